"""This machine as a cluster, without torch."""
