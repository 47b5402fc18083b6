"""Pure functions: the split rule, and from the requests of a call to its plan."""
