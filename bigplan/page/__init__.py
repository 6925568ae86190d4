"""One self-contained page, and pictures, of a plan, a run, a cluster or an experiment."""
