"""The operations of a model's whole graph: what each computes to the last bit (NumPy), and its kernels' contract."""
