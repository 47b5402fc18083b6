"""The protocol between this package and a dispatcher, and the two dispatchers."""
