"""The numeric sampling parameters: one declaration, the same names everywhere."""

import math

import pytest

from pagewire.errors import RequestError
from pagewire.gateway.api.fields import GenerationFields
from pagewire.sampling import NUMBERS, SamplingParams, numbers_of
from pagewire.scheduler.core.sequence import Sampling
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb
from pagewire.worker.protocol.steps.step import StepSampling

NAMES = {number.name for number in NUMBERS}


def test_messages_and_fields_have_every_parameter() -> None:
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) >= NAMES
    assert set(worker_pb.SlotSampling.DESCRIPTOR.fields_by_name) >= NAMES
    assert set(GenerationFields.model_fields) >= NAMES
    assert (
        NAMES == set(numbers_of(Sampling(seed=0, min_tokens=0))) == set(numbers_of(StepSampling()))
    )


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_the_ends_of_each_range(number) -> None:
    step = 1 if number.integer else 0.01
    kind = int if number.integer else float
    assert number.fault(kind(number.high)) is None
    assert number.fault(kind(number.high) + step) is not None
    assert number.fault(kind(number.low) - step) is not None
    assert (number.fault(kind(number.low)) is None) is not number.above_low
    assert number.fault(kind(number.low) + step) is None
    assert number.fault(math.nan) is not None
    with pytest.raises(RequestError, match=f"^{number.name} is ") as caught:
        SamplingParams(**{number.name: kind(number.high) + step})
    assert caught.value.field == number.name
