"""The matrices of a layer: the projections in each, and their quantization."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.config.experts import ExpertsConfig
from pagewire.worker.model.quantization.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Stack:
    """Projections with the same input, in the order of their rows in one matrix."""

    names: tuple[str, ...]  # in the checkpoint, after the name of the layer
    rows: tuple[int, ...]
    columns: int
    experts: int = 0  # number of experts, with rows one below the other; 0 for an ordinary layer
    # All experts are one tensor in the checkpoint. With `in_turns`, the rows of an expert's gates
    # and values alternate there.
    together: bool = False
    in_turns: bool = False


def layer_name(config: ModelConfig, number: int) -> str:
    """The prefix of the names of a layer's tensors; `number` counts the layers of `config`."""
    return f"model.layers.{config.numbers[number]}."


def layer_stacks(config: ModelConfig, number: int) -> dict[str, Stack]:
    """The projections in each matrix of `LayerWeights`, except the router and a shared gate."""
    hidden, inner = config.hidden_size, config.intermediate_size
    stacks = _attention_stacks(config, hidden)
    if config.experts is not None and config.experts.layers[number]:
        return stacks | _expert_stacks(config, config.experts)
    up = {"gate": inner, "up": inner} if config.gated else {"up": inner}
    return stacks | {
        "gate_up": _stack(config, "gate_up", up, hidden),
        "down": _stack(config, "down", {"down": hidden}, inner),
    }


def _attention_stacks(config: ModelConfig, hidden: int) -> dict[str, Stack]:
    latent, heads = config.latent, config.num_heads
    if latent is None:
        query, key = heads * config.head_dim, config.num_kv_heads * config.head_dim
        return {
            "qkv": _stack(config, "qkv", {"q": query, "k": key, "v": key}, hidden),
            "output": _stack(config, "output", {"output": hidden}, query),
        }
    query, value = heads * latent.query_dim, heads * latent.value_dim
    first = {"q": query} if latent.query_rank is None else {"query_down": latent.query_rank}
    up = {"kv_up": heads * latent.plain_dim + value}
    stacks = {
        "qkv": _stack(config, "qkv", {**first, "kv_down": latent.cached_dim}, hidden),
        "kv_up": _stack(config, "kv_up", up, latent.rank),
        "output": _stack(config, "output", {"output": hidden}, value),
    }
    if latent.query_rank is not None:
        stacks["query_up"] = _stack(config, "query_up", {"query_up": query}, latent.query_rank)
    return stacks


def _expert_stacks(config: ModelConfig, experts: ExpertsConfig) -> dict[str, Stack]:
    names, hidden, inner = config.names, config.hidden_size, experts.intermediate_size
    count, shared = experts.count, experts.shared_size
    if "experts_gate_up" in names.parts:
        whole, down = names.part("experts_gate_up"), names.part("experts_down")
        turns = experts.transposed
        stacks = {
            "gate_up": Stack((whole,), (2 * count * inner,), hidden, count, True, turns),
            "down": Stack((down,), (count * hidden,), inner, count, True),
        }
    else:
        gates, ups, downs = (
            [names.part(f"expert_{part}").format(expert=expert) for expert in range(count)]
            for part in ("gate", "up", "down")
        )
        both = tuple(name for pair in zip(gates, ups, strict=True) for name in pair)
        stacks = {
            "gate_up": Stack(both, (inner,) * (2 * count), hidden, count),
            "down": Stack(tuple(downs), (hidden,) * count, inner, count),
        }
    if shared is not None:
        up = (names.part("shared_gate_proj"), names.part("shared_up_proj"))
        stacks["shared_gate_up"] = Stack(up, (shared, shared), hidden)
        stacks["shared_down"] = Stack((names.part("shared_down"),), (hidden,), shared)
    return stacks


def _stack(config: ModelConfig, whole: str, rows: Mapping[str, int], columns: int) -> Stack:
    """A matrix of parts with these `rows`, or of the whole if the family stores it so."""
    names = config.names
    if whole in names.parts:
        return Stack((names.part(whole),), (sum(rows.values()),), columns)
    return Stack(tuple(map(names.part, rows)), tuple(rows.values()), columns)


def head_stack(config: ModelConfig) -> Stack:
    """The language model head, whose name has no layer before it."""
    return Stack(("lm_head",), (config.vocab_size,), config.hidden_size)


def scheme_of(config: ModelConfig, prefix: str, stack: Stack) -> Scheme | None:
    """How a matrix is quantized; None for a plain one.

    SetupError if only some of its projections are quantized, or in another format.
    """
    quantization, names = config.quantization, config.names
    if quantization is None:
        return None
    schemes = [quantization.scheme_of(*names.stored(f"{prefix}{name}")) for name in stack.names]
    if any(scheme != schemes[0] for scheme in schemes):
        found = ", ".join(f"{n}: {s}" for n, s in zip(stack.names, schemes, strict=True))
        raise SetupError(
            f"config.json: quantization_config describes different formats for projections of "
            f"{prefix.rstrip('.')} that are one matrix ({found}); use weights in which all of "
            "these, or none, are quantized"
        )
    return schemes[0]


def layer_columns(config: ModelConfig) -> dict[str, int]:
    """The inputs of each linear layer of the decoder, by every name that a checkpoint may use."""
    return {
        stored: stack.columns
        for number in range(config.num_layers)
        for stack in layer_stacks(config, number).values()
        for name in stack.names
        for stored in config.names.stored(f"{layer_name(config, number)}{name}")
    }
