"""Finding and loading every kernel that a worker on a GPU will launch.

Both go through the very steps that will be captured, so there is no second list of kernels. One
layer of each kind is enough.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.decoder import KINDS_OF_LAYERS, Decoder
from pagewire.worker.model.weights import empty_weights
from pagewire.worker.ops import Ops
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.graphs import GraphBackend
from pagewire.worker.startup.compilations import collected, compiled_here
from pagewire.worker.startup.compile_pool import Compiled, Job

log = logging.getLogger(__name__)


def collect_kernels(
    model: ModelConfig,
    ops: Ops,
    cos_sin: Tensor,
    limits: Limits,
    dtype: torch.dtype,
    profile: Callable[[Decoder], None],
    submit: Callable[[Job], None],
) -> None:
    """Hands every variant that `profile` and a graph backend need to `submit`; compiles nothing.

    It needs no weights: those that it makes are undefined. As no kernel runs, token ids and slots
    keep the zeros that they begin with, so whatever else is computed is harmless.
    """
    model = replace(model, num_layers=min(KINDS_OF_LAYERS, model.num_layers))
    weights = empty_weights(model, dtype, cos_sin.device)
    decoder = Decoder(model, weights, ops, cos_sin)
    with collected(submit):
        profile(decoder)
        _rehearse(decoder, limits, dtype)
    del decoder, weights
    torch.cuda.empty_cache()


def load_kernels(decoder: Decoder, limits: Limits, dtype: torch.dtype) -> list[str]:
    """Loads every variant that a graph backend needs; the names of those that it had to compile."""
    with compiled_here() as names:
        _rehearse(decoder.shallow(), limits, dtype)
    return names


def _rehearse(decoder: Decoder, limits: Limits, dtype: torch.dtype) -> None:
    small = replace(limits, num_blocks=1, host_blocks=min(1, limits.host_blocks))
    GraphBackend(decoder, small, dtype).rehearse()


def report_compilations(compiled: list[Compiled], late: list[str]) -> None:
    """Logs what the pool has compiled, if there was one, and what the worker had to."""
    for job in compiled:
        if job.error is not None:
            log.warning("kernel %s was not compiled ahead: %s", job.kernel, job.error)
    ahead = "no kernels compiled ahead"
    if compiled:
        done = sum(job.error is None for job in compiled)
        seconds = [job.seconds for job in compiled]
        ahead = (
            f"{done} kernel variants compiled or found ahead, {sum(seconds):.1f} s of compilers' "
            f"time, {max(seconds):.1f} of it for the slowest"
        )
    log.info("%s; %d compiled here%s", ahead, len(late), f": {', '.join(late)}" if late else "")
