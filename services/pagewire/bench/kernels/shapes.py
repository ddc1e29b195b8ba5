"""The shapes at which operations are timed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes of a model that its operations depend on."""

    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    qk_norm: bool

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the weights of a layer and of the head, by name."""
        width = self.query_heads * self.head_dim
        return {
            "qkv": (width + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, width),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "lm_head": (self.vocabulary, self.hidden),
        }


MODELS = {
    "qwen3-0.6b": Shapes(1024, 16, 8, 128, 3072, 151_936, qk_norm=True),
    "llama-3.1-8b": Shapes(4096, 32, 8, 128, 14_336, 128_256, qk_norm=False),
}


@dataclass(frozen=True, slots=True)
class ExpertShapes:
    """The sizes of a layer with experts."""

    hidden: int
    intermediate: int  # of one expert
    experts: int
    top_k: int


EXPERT_MODELS = {
    "qwen3-30b-a3b": ExpertShapes(2048, 768, experts=128, top_k=8),
    "gpt-oss-20b": ExpertShapes(2880, 2880, experts=32, top_k=4),
}


@dataclass(frozen=True, slots=True)
class LatentShapes:
    """The sizes of a layer with latent attention."""

    heads: int
    plain: int  # values of a query that are not rotated
    rank: int  # values of a latent vector
    rotated: int  # values of a rotated key


LATENT_MODELS = {
    "deepseek-v2-lite": LatentShapes(16, plain=128, rank=512, rotated=64),
    "deepseek-v3": LatentShapes(128, plain=128, rank=512, rotated=64),
}


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Sequences in groups with a common prefix."""

    groups: int
    shared: int  # positions of each prefix
    rows: int  # sequences of all groups together
    own: int  # further positions of each sequence


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the calls of each operation."""

    tokens: int = 4096  # in norm, activation and RoPE
    decode: tuple[tuple[int, int], ...] = ((64, 2048), (1, 32_768), (256, 720))  # rows, length
    shared_prefix: SharedPrefix = SharedPrefix(groups=4, shared=2048, rows=512, own=128)
    prefill: tuple[tuple[int, int], ...] = ((1, 8192), (4, 2000))  # chunks, length
    sampled_rows: int = 64
    linear_tokens: tuple[int, ...] = (1, 8, 32)
    expert_tokens: tuple[int, ...] = (1, 32, 256, 8192)
    compute_bound_tokens: int = 1024  # from here on, operations count as the work of experts
    # All inputs of a case together have at least this many bytes, several times the L2 cache.
    rotated_bytes: int = 2**29
