"""A sequence over several devices or MPI ranks."""
