"""What the user reads: a plan's summary, and predicted beside measured."""
