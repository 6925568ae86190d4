"""Plans the best way to train a model on a cluster, and runs exactly that plan."""

__version__ = "0.1.0"
