"""The error of a worker that cannot start."""


class SetupError(Exception):
    """The model, its files or the settings are not supported. The message says what to change."""
