"""Kernels that no generator makes: written by hand in Triton."""
