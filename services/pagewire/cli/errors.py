"""Failures that end a command with a message and no traceback."""


class CommandError(Exception):
    """What went wrong and what to do about it, for people; the command ends with status 1."""
