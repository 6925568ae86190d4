"""Which operators of a graph are one kernel, and its source: without a GPU framework."""
