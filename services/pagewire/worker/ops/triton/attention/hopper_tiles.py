"""The KV tiles of Hopper's prefill attention, for its loader and its consumers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HEAD_DIM = gl.constexpr(128)
TILE = gl.constexpr(128)  # KV positions of a step
STAGES = gl.constexpr(2)  # KV tiles in shared memory


@gluon.jit
def advanced(stage, phase):
    """Return the stage after `stage`, and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
