"""All operations of one implementation."""

from __future__ import annotations

from typing import Protocol

from pagewire.worker.ops.contract.activation import ActivationOps
from pagewire.worker.ops.contract.attention import AttentionOps
from pagewire.worker.ops.contract.blocks import BlockOps
from pagewire.worker.ops.contract.drafts import DraftOps
from pagewire.worker.ops.contract.experts import ExpertOps
from pagewire.worker.ops.contract.latent import LatentOps
from pagewire.worker.ops.contract.linear import LinearOps
from pagewire.worker.ops.contract.norm import NormOps
from pagewire.worker.ops.contract.quantized import QuantizedOps
from pagewire.worker.ops.contract.rope import RopeOps
from pagewire.worker.ops.contract.sampling import SamplingOps
from pagewire.worker.ops.contract.step import StepOps


class Ops(
    NormOps,
    ActivationOps,
    LinearOps,
    ExpertOps,
    QuantizedOps,
    RopeOps,
    AttentionOps,
    LatentOps,
    SamplingOps,
    StepOps,
    DraftOps,
    BlockOps,
    Protocol,
):
    """The operations that a decoder is made of.

    The modules `reference.ops` and `triton.ops` implement this protocol: their functions are its
    methods, and mypy compares the signatures.
    """
