"""Shared parts of the tools: inputs, split layouts, the oracle, comparison of bits, timing and files."""
