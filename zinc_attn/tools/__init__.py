"""Sweep, benchmark, check, cost model, export: what the command line calls."""
