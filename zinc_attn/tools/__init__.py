"""Sweep, benchmark, check, cost model, export, whole models: what the command line calls."""
