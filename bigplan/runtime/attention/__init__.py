"""Causal attention of heads: torch's fused kernels, generated ones, and plain torch."""
