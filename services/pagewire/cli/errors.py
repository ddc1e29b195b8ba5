"""The error that ends a command with a message instead of a traceback."""


class CommandError(Exception):
    """Ends the command with status 1. The message says what is wrong and what to do."""
