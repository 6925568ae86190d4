"""Ranks that work together: communicators, and what split layers and sequences exchange."""
