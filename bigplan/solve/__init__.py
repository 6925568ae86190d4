"""Choose: the placement problem as an integer program, its bounds, the search over strategies."""
