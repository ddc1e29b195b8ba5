"""Finds and loads every kernel that a worker on a GPU will launch.

Both functions run the steps that will be captured, so there is no separate list of kernels to
maintain. One layer of each kind is enough.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.eagle.config import EagleConfig
from pagewire.worker.model.eagle.head import EagleHead
from pagewire.worker.model.eagle.loading import load_eagle_head
from pagewire.worker.model.rotary_table import rope_tables
from pagewire.worker.model.served_weights import served_weights
from pagewire.worker.model.weights import empty_weights
from pagewire.worker.ops import Ops
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.graphs.backend import GraphBackend
from pagewire.worker.startup.arranged_weights import arranged_weights
from pagewire.worker.startup.compile_pool import CompileJob, CompileResult
from pagewire.worker.startup.triton_hooks import collecting_kernels, recording_compilations

log = logging.getLogger(__name__)


def collect_kernels(
    model: ModelConfig,
    ops: Ops,
    tables: tuple[Tensor, ...],
    limits: Limits,
    dtype: torch.dtype,
    before_graphs: Callable[[Decoder], None],
    submit: Callable[[CompileJob], None],
    draft: ModelConfig | EagleConfig | None = None,
) -> None:
    """Passes every kernel variant that `before_graphs` and a graph backend need to `submit`.

    It compiles nothing and needs no checkpoint: it uses weights with undefined values. No Triton
    kernel runs, so token ids and slots stay 0, and torch's own kernels read valid addresses.
    `draft` is a draft model or a head.
    """
    decoder = _empty_decoder(model, ops, tables, dtype)
    drafting: Decoder | EagleHead | None = None
    if isinstance(draft, EagleConfig):
        drafting = load_eagle_head(None, draft, decoder, limits.max_model_len, seed=0)
    elif draft is not None:
        drafting_tables = rope_tables(draft, limits.max_model_len, tables[0].device)
        drafting = _empty_decoder(draft, ops, drafting_tables, dtype)
    with collecting_kernels(submit):
        before_graphs(decoder)
        _dummy_run(decoder, limits, dtype, drafting)
    del decoder, drafting
    torch.cuda.empty_cache()


def _empty_decoder(
    model: ModelConfig, ops: Ops, tables: tuple[Tensor, ...], dtype: torch.dtype
) -> Decoder:
    """One layer of each kind of a model, with undefined values."""
    kept = model.sample_layers()
    model = model.with_layers(kept)
    weights = served_weights(model, empty_weights(model, dtype, tables[0].device))
    return Decoder(model, arranged_weights(weights, ops), ops, tuple(tables[i] for i in kept))


def load_kernels(
    decoder: Decoder, limits: Limits, dtype: torch.dtype, draft: Decoder | EagleHead | None = None
) -> list[str]:
    """Loads every kernel variant of a graph backend; returns the names of compiled ones."""
    drafting = draft.with_sample_layers() if isinstance(draft, Decoder) else draft
    with recording_compilations() as names:
        _dummy_run(decoder.with_sample_layers(), limits, dtype, drafting)
    return names


def _dummy_run(
    decoder: Decoder, limits: Limits, dtype: torch.dtype, draft: Decoder | EagleHead | None
) -> None:
    if isinstance(draft, EagleHead):
        draft = draft.with_inputs(0)
    small = replace(limits, num_blocks=1, host_blocks=min(1, limits.host_blocks))
    GraphBackend(decoder, small, dtype, draft).dummy_run()


def report_compilations(compiled: list[CompileResult], late: list[str]) -> None:
    """Logs the pool's compilations, if there are any, and the `late` kernels of this process."""
    for job in compiled:
        if job.error is not None:
            log.warning("kernel %s was not compiled ahead: %s", job.kernel, job.error)
    ahead = "no kernels compiled ahead"
    if compiled:
        done = sum(job.error is None for job in compiled)
        seconds = [job.seconds for job in compiled]
        ahead = (
            f"{done} kernel variants compiled or found ahead in {sum(seconds):.1f} s of compiler "
            f"time, {max(seconds):.1f} s for the slowest"
        )
    log.info(
        "%s; %d compiled by the worker%s", ahead, len(late), f": {', '.join(late)}" if late else ""
    )
