"""Why a worker cannot start."""


class SetupError(Exception):
    """The model, its files or the settings cannot be served; the message says what to change."""
