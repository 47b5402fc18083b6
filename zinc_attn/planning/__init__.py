"""Pure functions: the split rule."""
