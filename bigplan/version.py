"""The version of bigplan; the package's metadata takes it from here."""

__version__ = "0.1.0"
