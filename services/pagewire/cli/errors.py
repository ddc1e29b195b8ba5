"""The error that ends a command with a message instead of a traceback."""


class CommandError(Exception):
    """Ends the command with status 1. The message states the problem and the remedy."""
