"""Latent attention in config.json: the sizes of its projections."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config.rope import RopeConfig
from pagewire.worker.model.config.values import positive

# The epsilon of the norms of latent vectors; transformers does not use `rms_norm_eps` there.
LATENT_NORM_EPS = 1e-6
MIN_VALUES, MAX_RANK, MAX_ROTATED = 16, 512, 128


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1).

    For each token and layer the KV cache has one latent vector, from which the keys and values of
    all heads are computed, and one rotated key that all heads share.
    """

    query_rank: int | None  # values of a compressed query; None: queries are not compressed
    rank: int  # values of a latent vector
    plain_dim: int  # values of a head's query and key that are not rotated
    rotated_dim: int  # values of a head's query and key that are rotated
    value_dim: int  # values of a head's value

    @property
    def query_dim(self) -> int:
        """Values of a head's query."""
        return self.plain_dim + self.rotated_dim

    @property
    def cached_dim(self) -> int:
        """Values of one token in the cache of a layer."""
        return self.rank + self.rotated_dim

    def check_kernels(self) -> None:
        """Raises SetupError if the Triton kernels do not read these sizes."""
        for key, size, most in (
            ("kv_lora_rank", self.rank, MAX_RANK),
            ("qk_rope_head_dim", self.rotated_dim, MAX_ROTATED),
        ):
            if not MIN_VALUES <= size <= most or size & (size - 1):
                raise SetupError(
                    f"config.json: {key} is {size}; the triton operations support powers of two "
                    f"from {MIN_VALUES} to {most}; use --ops torch"
                )


def read_latent(raw: Mapping[str, Any], heads: int) -> LatentConfig:
    """The sizes of latent attention; SetupError names an unsupported value.

    `heads` are the query heads. Each has its own keys and values, computed from the latent vector.
    """
    kv_heads = positive(raw, "num_key_value_heads", default=heads)
    if kv_heads != heads:
        raise SetupError(
            f"config.json: num_key_value_heads is {kv_heads} and num_attention_heads {heads}; with "
            "latent attention they must be equal"
        )
    rotated = positive(raw, "qk_rope_head_dim")
    if rotated % 2:
        raise SetupError(f"config.json: qk_rope_head_dim is {rotated}; it must be even")
    compressed = raw.get("q_lora_rank") is not None
    return LatentConfig(
        query_rank=positive(raw, "q_lora_rank") if compressed else None,
        rank=positive(raw, "kv_lora_rank"),
        plain_dim=positive(raw, "qk_nope_head_dim"),
        rotated_dim=rotated,
        value_dim=positive(raw, "v_head_dim"),
    )


def latent_scale(latent: LatentConfig, rope: RopeConfig | None) -> float:
    """The factor of the scores: `query_dim ** -0.5`, times YaRN's factor for both sides."""
    factor = 1.0 if rope is None else rope.score_factor
    return float(latent.query_dim**-0.5) * factor
