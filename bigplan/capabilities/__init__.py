"""Limits of the engines: why an engine cannot run a training with a strategy, or that it can."""
