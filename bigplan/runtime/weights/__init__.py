"""Weights that a run starts from, at their homes in memory, and as a digest."""
