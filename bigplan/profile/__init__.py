"""This machine measured: its description with the rates that it reached, each with its source."""
