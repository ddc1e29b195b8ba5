"""Logging to standard error. Log records never contain prompts or outputs."""

import logging
import sys

FORMAT = "%(asctime)s.%(msecs)03d %(levelname).1s {service} %(name)s: %(message)s"


def configure(service: str, level: str) -> None:
    """Writes log records of this process to standard error, with the name of its service."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=FORMAT.format(service=service),
        datefmt="%H:%M:%S",
        force=True,
    )
