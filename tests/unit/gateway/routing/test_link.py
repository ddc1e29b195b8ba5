"""Messages about requests between the gateway and a scheduler."""

from pathlib import Path

from pagewire.errors import Code
from pagewire.v1 import inference_pb2 as pb
from support.scripted.routing import (
    Connect,
    all_ended,
    assert_complete,
    scripted_generation,
)
from support.scripted.scripted_scheduler import ScriptedScheduler
from support.waiting import eventually


async def test_a_repeated_delta_is_dropped(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    schedulers = await connect(await peers[0].start())
    run = scripted_generation("twice=2")
    schedulers.submit([run])
    await all_ended([run], 5)
    assert_complete([run])


async def test_a_gap_in_the_output_fails_only_that_request(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.01
    schedulers = await connect(await peers[0].start())
    broken, good = scripted_generation("skip=2"), scripted_generation()
    schedulers.submit([broken])
    schedulers.submit([good])
    await all_ended([broken], 5)
    assert broken.failure is not None
    assert broken.failure.code == Code.INTERNAL
    await all_ended([good], 5)
    assert_complete([good])
    assert peers[0].aborted == ["r"]


async def test_abort_reaches_the_scheduler(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.01
    schedulers = await connect(await peers[0].start())
    run = scripted_generation(tokens=500)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 2)
    schedulers.abort(run)
    await eventually(lambda: peers[0].aborted == ["r"])
    await eventually(lambda: all(link.idle for link in schedulers.links.values()))


async def test_a_scheduler_may_listen_on_a_socket_file(
    connect: Connect, peers: list[ScriptedScheduler], tmp_path: Path
) -> None:
    schedulers = await connect(await peers[0].start(f"unix:{tmp_path}/scheduler.sock"))
    run = scripted_generation()
    schedulers.submit([run])
    await all_ended([run], 5)
    assert_complete([run])


async def test_the_next_scheduler_is_told_about_lost_workers(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    """As long as no token has arrived since."""
    peers[1].waiting, peers[0].step = 50, 0.01
    peers[0].tells = pb.WorkerLosses(workers=3, alone=[0.5])
    schedulers = await connect(*[await peer.start() for peer in peers])
    run = scripted_generation(tokens=60)
    schedulers.submit([run])
    await eventually(lambda: len(run.tokens) > 5)
    peers[0].unable, peers[1].step = True, 0.01
    held = len(run.tokens)
    await eventually(lambda: len(run.tokens) > held + 5)
    assert (peers[0].told, peers[1].told) == ([0], [3])
    peers[0].unable, peers[0].ready_workers = False, 2
    await eventually(lambda: all(link.ready for link in schedulers.links.values()))
    await peers[1].stop()
    await all_ended([run])
    assert peers[0].told == [0, 0]
    assert_complete([run])


async def test_a_scheduler_is_told_that_a_request_has_waited(
    connect: Connect, peers: list[ScriptedScheduler]
) -> None:
    peers[0].step = 0.02
    schedulers = await connect(await peers[0].start())
    schedulers.submit([scripted_generation()])
    await eventually(lambda: peers[0].moved == [False])
    peers[0].ready_workers = 0
    await eventually(lambda: not schedulers.ready)
    late = scripted_generation("late")
    schedulers.submit([late])
    peers[0].ready_workers = 1
    await all_ended([late], 5)
    assert peers[0].moved == [False, True]
