"""A rank's program, action by action: lanes, passes, copies, updates, steps."""
