"""Do it: execute a plan's program on this machine with torch."""
