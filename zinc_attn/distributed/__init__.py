"""One sequence on several devices, of one process or of MPI ranks, with the bits of one device that holds it all."""
