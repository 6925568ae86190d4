"""Experts: routing, rows on their way to experts and back, and their products."""
