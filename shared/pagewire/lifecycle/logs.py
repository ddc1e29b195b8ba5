"""Logging: one line a record on standard error. Prompts and outputs are never logged."""

import logging
import sys

FORMAT = "%(asctime)s.%(msecs)03d %(levelname).1s {service} %(name)s: %(message)s"


def configure(service: str, level: str) -> None:
    """Sends log records of this process to standard error under the name of its service."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=FORMAT.format(service=service),
        datefmt="%H:%M:%S",
        force=True,
    )
