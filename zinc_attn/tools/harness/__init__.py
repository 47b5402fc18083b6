"""What every tool shares: inputs, split layouts, the oracle, comparison of bits, timing, files and pictures."""
