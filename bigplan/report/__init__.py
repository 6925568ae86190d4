"""What the user reads: summaries of plans, and predictions beside measurements."""
