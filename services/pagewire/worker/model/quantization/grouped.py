"""Functions that all kinds of grouped checkpoints share. This module needs no torch."""

from typing import Any

from pagewire.worker.model.quantization.fields import Fields


def take_group(fields: Fields, default: Any) -> int | None:
    """The field `group_size`: inputs of a group. None, stored as -1, means all inputs."""
    group = fields.take("group_size", default)
    if group == -1:
        return None
    if type(group) is not int or group < 16 or group & (group - 1):
        raise fields.refused("group_size", group, "supported are powers of two from 16, and -1")
    return group
