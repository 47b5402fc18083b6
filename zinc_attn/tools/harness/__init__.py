"""What every tool shares: inputs, split layouts, the oracle, comparison of bits, timing and files."""
