"""One text for all viewers each tick, and none without viewers."""

import asyncio
from typing import Any

import pytest

from pagewire.gateway.errors import ApiError
from pagewire.gateway.page.viewers import Viewers
from support.waiting import eventually


class Viewer:
    """A connection that reads on demand."""

    def __init__(self, viewers: Viewers) -> None:
        self.received: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._left = asyncio.Event()
        self.ended = False
        self.task = asyncio.create_task(viewers.response()({}, self._receive, self._send))

    async def _receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.body":
            self.ended = not message["more_body"]
            if message["body"]:
                self.received.append(message["body"])

    async def leave(self) -> None:
        self._left.set()
        await self.task


class Engine:
    def __init__(self) -> None:
        self.made = 0

    async def text(self) -> str:
        self.made += 1
        return str(self.made)


async def test_all_viewers_share_one_text_and_none_is_made_for_nobody() -> None:
    engine = Engine()
    viewers = Viewers(engine.text, tick=0.02)
    await asyncio.sleep(0.1)
    assert engine.made == 0
    watching = [Viewer(viewers) for _ in range(10)]
    await eventually(lambda: all(len(viewer.received) >= 3 for viewer in watching))
    texts = {text for viewer in watching for text in viewer.received}
    assert texts <= {f"data: {number}\n\n".encode() for number in range(1, engine.made + 1)}
    assert watching[0].received[1] is watching[9].received[1]
    for viewer in watching:
        await viewer.leave()
    made = engine.made
    await asyncio.sleep(0.1)
    assert (engine.made, viewers.count) == (made, 0)
    again = Viewer(viewers)
    await eventually(lambda: again.received != [])
    await again.leave()


async def test_a_slow_viewer_misses_texts_and_delays_nobody() -> None:
    engine = Engine()
    viewers = Viewers(engine.text, tick=0.01)
    slow, fast = Viewer(viewers), Viewer(viewers)
    await eventually(lambda: len(slow.received) > 0)
    slow.reads.clear()
    await eventually(lambda: len(fast.received) > 20)
    seen = len(slow.received)
    slow.reads.set()
    await eventually(lambda: len(slow.received) > seen + 1)
    assert len(slow.received) < len(fast.received) - 10
    await slow.leave()
    await fast.leave()


async def test_there_is_a_most_and_an_end() -> None:
    viewers = Viewers(Engine().text, tick=0.01, most=1)
    viewer = Viewer(viewers)
    await eventually(lambda: viewers.count == 1)
    with pytest.raises(ApiError) as refused:
        viewers.response()
    assert refused.value.status == 429
    await viewers.close()
    await viewer.task
    assert viewer.ended
    with pytest.raises(ApiError) as refused:
        viewers.response()
    assert refused.value.status == 503


async def test_a_failure_to_make_a_text_ends_no_stream() -> None:
    calls = 0

    async def make() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("no scheduler")
        return "{}"

    viewers = Viewers(make, tick=0.01)
    viewer = Viewer(viewers)
    await eventually(lambda: viewer.received != [])
    await viewer.leave()
