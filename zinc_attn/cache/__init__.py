"""The paged KV cache on the device."""
