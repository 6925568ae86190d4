"""`bigplan kernels bench`: kernels measured beside predictions, limits and others' code."""
