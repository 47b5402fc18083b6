"""The arithmetic in NumPy: the two references, states, partial states."""
