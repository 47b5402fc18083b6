"""What shaders and host agree on."""
