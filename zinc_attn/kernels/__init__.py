"""The contract between shaders and host."""
