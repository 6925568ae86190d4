"""Many plans from one file: swept, planned, launched and compared."""
