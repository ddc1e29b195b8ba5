"""The configuration of one model, as the decoder needs it."""

from dataclasses import dataclass, replace

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config.experts import ExpertsConfig
from pagewire.worker.model.config.family import (
    LAYER_NAMES,
    Activation,
    Block,
    Norm,
    QKNorm,
    WeightNames,
)
from pagewire.worker.model.config.latent import LatentConfig
from pagewire.worker.model.config.rope import RopeConfig
from pagewire.worker.model.quantization.scheme import Quantization, Scheme

# Sizes of heads that the Triton kernels read, with all powers of two between.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of one model, as the decoder needs it. `Family` explains the kinds.

    With `latent`, `head_dim` counts only the rotated values of a head. All query heads share one
    rotated key, so `num_kv_heads` is 1.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    served_head_dim: int  # values of a head on the device: `head_dim`, and zeros if it is more
    max_position_embeddings: int
    block: Block
    norm: Norm
    norm_bias: bool
    norm_eps: float
    qk_norm: QKNorm | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: Activation
    gated: bool
    experts: ExpertsConfig | None
    ropes: tuple[RopeConfig | None, ...]  # by layer; None is a layer without RoPE
    interleaved: bool  # RoPE rotates neighbouring values
    numbers: tuple[int, ...]  # by layer: its number in the checkpoint
    windows: tuple[int | None, ...]  # by layer: positions that a token sees, itself included
    attention_scale: float  # multiplies the scores
    attention_soft_cap: float | None
    attention_sinks: bool
    logit_soft_cap: float | None
    embedding_multiplier: float
    residual_multiplier: float  # of what attention and MLP add to the residual stream
    logit_multiplier: float
    tied_head: bool
    names: WeightNames
    dtype: str
    initializer_range: float
    quantization: Quantization | None = None
    latent: LatentConfig | None = None  # latent attention, or None for attention over whole heads
    fp8_kv: bool = False  # keys and values are stored in FP8, with scales

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    @property
    def query_dim(self) -> int:
        """Values of a query head on the device, as `Decoder.body` returns them."""
        return self.served_head_dim if self.latent is None else self.latent.query_dim

    @property
    def qkv_size(self) -> int:
        """Output features of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def gate_up_size(self) -> int:
        """Output features of the matrix before the activation."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def norms_folded(self) -> bool:
        """Whether the norms before attention and MLP are multiplied into the next matrices.

        `1 + weight` is not folded: half-precision matrices would round it more than transformers.
        """
        return self.norm == "rms" and self.block in ("pre", "sandwich")

    @property
    def experts_quantized(self) -> bool:
        """Whether any layer has experts with quantized weights."""
        if self.experts is None or self.quantization is None:
            return False
        together = "experts_gate_up" in self.names.parts
        part = self.names.part("experts_gate_up" if together else "expert_gate")
        return any(
            sparse
            and self.quantization.scheme_of(
                *self.names.stored(f"model.layers.{number}.{part.format(expert=0)}")
            )
            is not None
            for number, sparse in zip(self.numbers, self.experts.layers, strict=True)
        )

    def check_quantizable(self, named: str) -> None:
        """Raises SetupError if weights of the model cannot be quantized; `named` is the cause."""
        quantization = self.quantization
        four = quantization is not None and quantization.method == "mxfp4"
        remedy = "use this model in bfloat16, float16 or float32"
        together = "experts_gate_up" in self.names.parts
        transposed = self.experts is not None and self.experts.transposed
        if four and not transposed:
            raise SetupError(
                f"{named}: experts in four bits are supported as gpt-oss has them, not as "
                f"{self.family} has; {remedy}"
            )
        if self.experts is not None and together and not four:
            raise SetupError(
                f"{named}: experts that are one tensor in a checkpoint, as {self.family} has, "
                f"cannot be quantized{' but by mxfp4' if transposed else ''}; {remedy}"
            )
        if self.experts is not None and quantization is not None and quantization.has_ordered:
            raise SetupError(
                f"{named}: groups with inputs in any order (desc_act or actorder) are not "
                f"supported for experts, as {self.family} has; use other weights of this model"
            )
        if self.latent is not None:
            raise SetupError(
                f"{named}: layers with latent attention, as {self.family} has, cannot be "
                "quantized; use this model in bfloat16, float16 or float32"
            )

    def with_heads_for_kernels(self) -> "ModelConfig":
        """The same model with heads padded to a size that the Triton kernels read.

        Zeros change no score and no output. SetupError if heads are too large, if weights are
        quantized, or if heads are normalized, because the zeros would count in the mean.
        """
        if self.latent is not None:
            self.latent.check_kernels()
            return self
        served = max(MIN_HEAD_DIM, 1 << (self.head_dim - 1).bit_length())
        if served > MAX_HEAD_DIM:
            raise SetupError(
                f"config.json: head_dim is {self.head_dim}; the triton operations support up to "
                f"{MAX_HEAD_DIM}; use --ops torch"
            )
        if served != self.head_dim and self.qk_norm is not None:
            raise SetupError(
                f"config.json: head_dim is {self.head_dim}; with norms of queries and keys the "
                "triton operations support powers of two from "
                f"{MIN_HEAD_DIM} to {MAX_HEAD_DIM}; use --ops torch"
            )
        if served != self.head_dim and self.quantization is not None:
            raise SetupError(
                f"config.json: head_dim is {self.head_dim} in this model of the family "
                f"{self.family}; with weights quantized by {self.quantization.method} the triton "
                f"operations support powers of two from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}; use "
                "--ops torch, or this model in bfloat16, float16 or float32"
            )
        return replace(self, served_head_dim=served)

    def with_layers(self, layers: tuple[int, ...]) -> "ModelConfig":
        """The same model with only these layers."""
        return replace(
            self,
            ropes=tuple(self.ropes[layer] for layer in layers),
            numbers=tuple(self.numbers[layer] for layer in layers),
            windows=tuple(self.windows[layer] for layer in layers),
            experts=None if self.experts is None else self.experts.with_layers(layers),
        )

    def sample_layers(self) -> tuple[int, ...]:
        """One layer of each kind: together they launch every kernel of the model.

        The last layer is a kind of its own (`Decoder.finish_last_layer`). The others differ in
        their windows, experts and quantization.
        """
        none = (False,) * self.num_layers
        sparse = none if self.experts is None else self.experts.layers
        schemes = [self._schemes(number) for number in self.numbers]
        kinds = [*enumerate(zip(self.windows, sparse, schemes, strict=True))][:-1]
        firsts = {kind: layer for layer, kind in reversed(kinds)}
        return (*sorted(firsts.values()), self.num_layers - 1)

    def _schemes(self, number: int) -> tuple[Scheme | None, ...]:
        """How each part of a layer is quantized, by the layer's number in the checkpoint."""
        if self.quantization is None:
            return ()
        parts = ({**LAYER_NAMES, **self.names.parts}).values()
        names = (self.names.stored(f"model.layers.{number}.{part}") for part in parts)
        return tuple(self.quantization.scheme_of(*stored) for stored in names)
