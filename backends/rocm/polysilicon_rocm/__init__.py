"""The rocm backend."""
