"""The declaration of a model family: a row of the table of families."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pagewire.worker.model.config.experts import ExpertKeys

Norm = Literal["rms", "rms_plus_one", "layer"]
Block = Literal["pre", "sandwich", "post", "parallel"]
QKNorm = Literal["head", "projection"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# The name of each part of a layer in a Hugging Face checkpoint, after `model.layers.N.`. A family
# that stores `q`, `k` and `v` as one matrix has a name for `qkv` instead; the same holds for
# `gate_up`. Names of experts contain the expert's number, unless a family stores `experts_gate_up`
# and `experts_down`.
LAYER_NAMES: Mapping[str, str] = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    # With latent attention, queries are `q`, or `query_down`, a norm and `query_up`. `kv_down`
    # computes the latent vector and the rotated key, `kv_up` the keys and values of all heads.
    "query_down": "self_attn.q_a_proj",
    "query_up": "self_attn.q_b_proj",
    "kv_down": "self_attn.kv_a_proj_with_mqa",
    "kv_up": "self_attn.kv_b_proj",
    "sinks": "self_attn.sinks",
    "attended_norm": "post_attention_layernorm",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "mlp_norm": "post_feedforward_layernorm",
    "router": "mlp.gate",
    "correction": "mlp.gate.e_score_correction_bias",
    "expert_gate": "mlp.experts.{expert}.gate_proj",
    "expert_up": "mlp.experts.{expert}.up_proj",
    "expert_down": "mlp.experts.{expert}.down_proj",
    "shared_gate_proj": "mlp.shared_expert.gate_proj",
    "shared_up_proj": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "shared_gate": "mlp.shared_expert_gate",
}


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The names of a checkpoint's tensors.

    `parts` are differences from `LAYER_NAMES`. A name that begins with the first value of a pair in
    `renamed` is read as if it began with the second value. Tensors that begin with one of `ignored`
    are not loaded: they belong to parts of a model that are not text. With `later_layers`, layers
    after the last one are not loaded either: they predict further tokens.
    """

    parts: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    later_layers: bool = False

    def part(self, name: str) -> str:
        """The name of a part of a layer."""
        return self.parts.get(name) or LAYER_NAMES[name]

    def canonical(self, name: str) -> str | None:
        """The name of a tensor with the common prefix; None if it is ignored."""
        if name.startswith(self.ignored):
            return None
        for prefix, usual in self.renamed:
            if name.startswith(prefix):
                return usual + name[len(prefix) :]
        return name

    def stored(self, name: str) -> tuple[str, ...]:
        """All names that a checkpoint may have for the tensor or layer with a common name.

        The last is the name in a decoder without a head.
        """
        renamed = (
            prefix + name[len(usual) :] for prefix, usual in self.renamed if name.startswith(usual)
        )
        return tuple(dict.fromkeys((name, *renamed, name.removeprefix("model."))))


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table of families.

    A field that ends in `_key` names a key of config.json. A field of type `bool | str` is True or
    False for the whole family, or names the key of config.json with this value. `defaults` are the
    family's values for keys that config.json does not have.
    """

    model_type: str
    architecture: str

    # Norms. `pre` stands before attention and before the MLP, `post` after each, `sandwich` at all
    # four places. `parallel` is one norm before both, which read the same input.
    block: Block = "pre"
    norm: Norm = "rms"  # `rms_plus_one` multiplies by 1 + weight
    norm_bias: bool = False
    norm_eps_key: str = "rms_norm_eps"
    # The norm of queries and keys covers each head separately, or the whole projection.
    qk_norm: QKNorm | None = None
    qk_norm_key: str | None = None  # without it, all models of the family have the norm

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    activation_key: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    gated: bool = True
    intermediate_size_key: str = "intermediate_size"

    # Rotary embedding. `interleaved` pairs neighbouring values of a head, not those of its halves.
    # Layers with RoPE: all; or those whose value in the list `no_rope_layers` is not 0; or those
    # with a window (with `windowed_if_any`, all if `sliding_window` is null); or all if
    # `position_embedding_type` is `rope`.
    interleaved: bool | str = False
    partial_rotary: bool = False  # `partial_rotary_factor` may be below 1
    rotary_layers: Literal[
        "all", "no_rope_layers", "windowed", "windowed_if_any", "position_embedding_type"
    ] = "all"
    # RoPE of layers with a window, if it differs: the key of its base, if any, and the default.
    local_rope: tuple[str | None, float] | None = None

    # The key of config.json that turns sliding windows on: None if the family has no windows,
    # `sliding_window` if the presence of that key is enough. Then all layers have the window,
    # except every `window_pattern`-th, and except those that `layer_types` excludes if the family
    # obeys that key.
    windowed_by: Literal["sliding_window", "use_sliding_window"] | None = None
    layer_types: bool = False
    window_pattern: int | None = None
    window_pattern_key: str | None = None

    # Multipliers and soft caps: keys that the family's models obey.
    root_embedding: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    embedding_multiplier_key: str | None = None
    residual_multiplier_key: str | None = None
    attention_multiplier_key: str | None = None
    query_scalar_key: str | None = None  # scores are multiplied by its value ** -0.5
    logit_multiplier_key: str | None = None
    logit_divisor_key: str | None = None
    soft_caps: bool = False
    attention_sinks: bool = False  # each head has a score that only adds to the softmax's sum

    # Another family's architecture that transformers writes for this model type.
    written_as: str | None = None
    # Keys that the family's config.json has instead of the common keys.
    aliases: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertKeys | None = None  # instead of the MLP, in some layers or in all
    latent: bool = False  # latent attention, see `LatentConfig`
    text_config: bool = False  # the language model is described by the object `text_config`
    names: WeightNames = WeightNames()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Keys with the only supported value. A missing or null key has this value.
    only: Mapping[str, Any] = field(default_factory=dict)
