"""One sequence on several devices of a process, with the bits of one device that holds it all."""
