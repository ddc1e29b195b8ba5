"""How the reader of a request gets the output of its generations."""

import pytest

from pagewire.gateway.errors import ClientGoneError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.packing import pack
from pagewire.v1 import inference_pb2 as pb


def eager_generation() -> Generation:
    return Generation(pb.GenerateRequest(), 0, 0, UpdateQueue(), eager=True)


async def test_a_slow_reader_gets_deltas_merged() -> None:
    run = eager_generation()
    for index in range(100):
        run.extend(pack([index]), "é".encode(), 0.0)
    assert await run.updates.take() == [run]
    assert run.take_text() == "é" * 100
    assert run.tokens.tolist() == list(range(100))
    run.extend(pack([100]), b"x", 0.0)
    assert await run.updates.take() == [run]


async def test_a_disconnect_ends_the_wait_of_the_reader() -> None:
    updates: UpdateQueue[Generation] = UpdateQueue()
    updates.client_left()
    with pytest.raises(ClientGoneError):
        await updates.take()
