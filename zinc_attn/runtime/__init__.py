"""The protocol between this package and a dispatcher, and the dispatchers."""
