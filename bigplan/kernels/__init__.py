"""Fused GPU kernels: one operator a file, each beside its plain-torch reference."""
