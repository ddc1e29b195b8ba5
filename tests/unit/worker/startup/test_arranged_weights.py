"""Matrices are arranged once for the kernels; those of experts stay."""

from dataclasses import replace

import torch

from pagewire.worker.model.quantization.quantizer import quantize_weight
from pagewire.worker.model.quantization.scheme import GroupedScheme
from pagewire.worker.model.weights import LayerWeights, Weights
from pagewire.worker.ops import load_ops
from pagewire.worker.ops.contract.quantized import GroupedWeight
from pagewire.worker.startup.arranged_weights import arranged_weights


class Arranging:
    """Operations that count arranged weights."""

    def __init__(self) -> None:
        self.given: list[GroupedWeight] = []

    def arranged(self, weight: GroupedWeight) -> GroupedWeight:
        self.given.append(weight)
        return replace(weight, pairs=torch.zeros(1, dtype=torch.int32))


def grouped() -> GroupedWeight:
    weight = quantize_weight(torch.randn(4, 128), GroupedScheme(4, 128, True, False), torch.float16)
    assert isinstance(weight, GroupedWeight)
    return weight


def layer(experts: bool) -> LayerWeights:
    return LayerWeights(
        input_norm=None,
        qkv=grouped(),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        output=torch.randn(4, 128),
        output_bias=None,
        post_norm=None,
        gate_up=grouped(),
        down=grouped(),
        router=torch.randn(2, 128) if experts else None,
        shared_down=grouped() if experts else None,
    )


def weights() -> Weights:
    embedding = torch.randn(8, 128)
    layers = (layer(experts=False), layer(experts=True))
    return Weights(embedding=embedding, layers=layers, norm=torch.ones(128), head=grouped())


def pairs(value: object) -> bool:
    assert isinstance(value, GroupedWeight)
    return value.pairs is not None


def test_all_but_experts_are_arranged_once():
    ops, given = Arranging(), weights()
    dense, experts = (found := arranged_weights(given, ops)).layers
    assert pairs(dense.qkv)
    assert pairs(dense.gate_up)
    assert pairs(dense.down)
    assert pairs(found.head)
    assert pairs(experts.qkv)
    assert pairs(experts.shared_down)
    assert not pairs(experts.gate_up)
    assert not pairs(experts.down)
    assert len(ops.given) == 6
    assert dense.output is given.layers[0].output
    assert found.embedding is given.embedding


def test_a_cpu_has_no_arrangement():
    given = weights()
    found = arranged_weights(given, load_ops("torch"))
    assert found.head is given.head
    assert found.layers[0].qkv is given.layers[0].qkv
