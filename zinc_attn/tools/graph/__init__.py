"""The graph of a small random model on a device: its logits, held to NumPy's to the last bit."""
