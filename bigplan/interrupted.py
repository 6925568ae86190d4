"""An interrupt that the user was told of. It imports nothing, so that it is there at once."""


class ToldInterrupt(KeyboardInterrupt):
    """A sentence told of it already, so the command line tells it no more."""
