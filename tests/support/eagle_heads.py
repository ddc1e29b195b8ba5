"""EAGLE-3 heads in the hub's format, and a reference for their drafts."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from support.models.tiny_models import save_model

BIGRAM_VOCAB = 64
# A token that the draft vocabulary of `save_bigram_head` does not have.
NEVER_DRAFTED = 40


def save_head(
    folder: Path,
    target: Path,
    drafts: int,
    tokens: Iterable[int] | None = None,
    seed: int = 1,
    **fields: Any,
) -> Path:
    """Saves a random head of the model in `target` for `drafts` of its tokens; returns `folder`.

    `tokens` lists the draft tokens, by default random ones. `fields` replaces fields of the head's
    config.json.
    """
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocabulary = of_target["hidden_size"], of_target["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": vocabulary,
        "draft_vocab_size": drafts,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "use_cache": True,
    } | fields
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, deviation: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * deviation

    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    inner = config["intermediate_size"]
    chosen = torch.randperm(vocabulary, generator=generator)[:drafts].sort().values
    if tokens is not None:
        chosen = torch.tensor(list(tokens))
    used = torch.zeros(vocabulary, dtype=torch.bool)
    used[chosen] = True
    tensors = {
        "fc.weight": normal(hidden, 3 * hidden, deviation=0.1),
        "midlayer.input_layernorm.weight": 1 + normal(hidden),
        "midlayer.hidden_norm.weight": 1 + normal(hidden),
        "midlayer.self_attn.q_proj.weight": normal(query, 2 * hidden, deviation=0.1),
        "midlayer.self_attn.k_proj.weight": normal(key, 2 * hidden, deviation=0.1),
        "midlayer.self_attn.v_proj.weight": normal(key, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": normal(hidden, query),
        "midlayer.post_attention_layernorm.weight": 1 + normal(hidden),
        "midlayer.mlp.gate_proj.weight": normal(inner, hidden),
        "midlayer.mlp.up_proj.weight": normal(inner, hidden),
        "midlayer.mlp.down_proj.weight": normal(hidden, inner),
        "norm.weight": 1 + normal(hidden),
        "lm_head.weight": normal(drafts, hidden),
        "d2t": chosen - torch.arange(drafts),
        "t2d": used,
    }
    return save(folder, config, tensors)


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Saves a head to `folder`, which it returns."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    # Copies, because a file cannot store two names for one tensor.
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors")
    return folder


def save_bigrams(folder: Path) -> Path:
    """Saves a model whose next token is likely the last one's successor; returns `folder`.

    Its layers add nothing, so its hidden states are the embedded tokens, one-hot vectors.
    """
    size = BIGRAM_VOCAB
    save_model(folder, "llama", vocab_size=size, hidden_size=size, num_hidden_layers=6)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if "norm" in name:
            tensor.fill_(1.0)
    tensors["model.embed_tokens.weight"] = torch.eye(size)
    tensors["lm_head.weight"] = torch.eye(size).roll(1, 0)  # 8 for the successor, 0 for others
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def save_bigram_head(folder: Path, target: Path) -> Path:
    """Saves a head that drafts as the model of `save_bigrams` draws; returns `folder`.

    Each position attends to itself alone. It adds the embedded token and subtracts the state, so
    its output is the next state, and a draft with a wrong state is wrong.
    """
    size = BIGRAM_VOCAB
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    save_head(folder, target, size - 1, **sizes)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    one, none = torch.eye(size), torch.zeros(size, size)
    kept = torch.cat((torch.arange(NEVER_DRAFTED), torch.arange(NEVER_DRAFTED + 1, size)))
    level = math.sqrt(size)  # of a normed one-hot vector
    # Queries and keys are the same for all tokens, so only their rotation makes scores differ.
    same = torch.cat((torch.full((size, size), 3.0 * math.sqrt(5.0) / level), none), 1)
    parts = "midlayer.self_attn."
    tensors |= {name: torch.ones(size) for name in tensors if "norm" in name}
    tensors |= {name: torch.zeros_like(tensors[name]) for name in tensors if ".mlp." in name}
    tensors |= {
        "fc.weight": torch.cat((none, one * level, none), 1),
        f"{parts}q_proj.weight": same,
        f"{parts}k_proj.weight": same,
        f"{parts}v_proj.weight": torch.cat((one, -one), 1),
        f"{parts}o_proj.weight": one,
        "lm_head.weight": one.roll(1, 0)[kept],
        "d2t": kept - torch.arange(size - 1),
    }
    return save(folder, config, tensors)


@dataclass
class ReferenceHead:
    """A head computed from its definition: all positions at once, with no cache.

    Position i reads token i + 1 and the target's states of position i, or its own output.
    """

    folder: Path
    target: PreTrainedModel
    inputs: tuple[int, int, int]  # layers whose inputs are the states

    def __post_init__(self) -> None:
        self.config = json.loads((self.folder / "config.json").read_text())
        self.tensors = load_file(self.folder / "model.safetensors")
        self.embedding = self.tensors.get("embed_tokens.weight")
        if self.embedding is None:
            self.embedding = self.target.get_input_embeddings().weight.detach()

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest chain of `count` tokens after `tokens`."""
        with torch.no_grad():
            found = self.target(torch.tensor([tokens[:-1]]), output_hidden_states=True)
            read = torch.cat([found.hidden_states[layer][0] for layer in self.inputs], -1)
            states = read @ self.tensors["fc.weight"].T
            chain: list[int] = []
            while True:
                output = self._layer(torch.tensor((tokens + chain)[1:]), states)
                logits = self._norm(output[-1:], "norm") @ self.tensors["lm_head.weight"].T
                draft = int(logits.argmax())
                chain.append(draft + int(self.tensors["d2t"][draft]))
                if len(chain) == count:
                    return chain
                states = torch.cat((states, output[-1:]))

    def _layer(self, following: Tensor, states: Tensor) -> Tensor:
        """The outputs `[positions, hidden]` of the layer."""
        w, config = self.tensors, self.config
        count, size = len(states), config["head_dim"]
        embedded = self._norm(self.embedding[following], "midlayer.input_layernorm")
        pairs = torch.cat((embedded, self._norm(states, "midlayer.hidden_norm")), -1)

        def heads(name: str) -> Tensor:  # [heads, positions, size]
            flat = pairs @ w[f"midlayer.self_attn.{name}_proj.weight"].T
            return flat.view(count, -1, size).transpose(0, 1)

        queries, keys, values = self._rotated(heads("q")), self._rotated(heads("k")), heads("v")
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        scores = (queries @ keys.transpose(1, 2) / math.sqrt(size)).masked_fill(later, -math.inf)
        attended = (scores.softmax(-1) @ values).transpose(0, 1).reshape(count, -1)
        hidden = states + attended @ w["midlayer.self_attn.o_proj.weight"].T
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate = normed @ w["midlayer.mlp.gate_proj.weight"].T
        inner = gate * gate.sigmoid() * (normed @ w["midlayer.mlp.up_proj.weight"].T)
        return hidden + inner @ w["midlayer.mlp.down_proj.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def _rotated(self, x: Tensor) -> Tensor:
        """`x [heads, positions, size]`, rotated in pairs of the halves of each head."""
        half = self.config["head_dim"] // 2
        turns = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * turns  # [positions, half]
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
