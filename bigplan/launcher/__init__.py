"""Runs a plan through Ray: places the workers, drives the steps, writes the record."""
