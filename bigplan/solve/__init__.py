"""Choose: the placement problem as an integer program, its bounds, and the search over strategies."""
