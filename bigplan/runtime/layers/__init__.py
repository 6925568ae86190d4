"""Layers: forward and backward, what they keep between, and where their gradients are added."""
