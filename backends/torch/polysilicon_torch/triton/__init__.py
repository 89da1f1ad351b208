"""Triton kernels, one family of operations a file, each with its launchers."""
