"""A helper process: one task after the other, until its service closes the connection.

    python -m pagewire.helpers.process FD

FD is one end of a socket pair. Each message is a frame: its size as eight bytes, little-endian,
then its bytes. The first frame in is what to compute (see HelperPool), pickled by the service that
started this process. Each further one is a task. Frames out have their kind behind the size.
"""

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable

from pagewire.errors import RequestError

SIZE = struct.Struct("<Q")
HEAD = struct.Struct("<Qc")
READY, ANSWER, REFUSAL, FAILURE = b"R", b"A", b"E", b"F"

# Below the service's event loop, which should find a CPU on a small machine too.
_NICE = 5
_PR_SET_PDEATHSIG = 1

Compute = Callable[[bytes], bytes]


def main() -> None:
    """Answers tasks until the connection ends."""
    # What is sent to a whole group is for the service, which drains first and then ends this.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    _end_with(os.getppid())
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        setup = _receive(connection)
        if setup is None:
            return
        compute = _load(setup)
        _send(connection, READY, b"")
        while (task := _receive(connection)) is not None:
            _send(connection, *_answer(compute, task))


def _end_with(parent: int) -> None:
    """Lets the kernel end this process with its service, whatever it computes at that time."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def _load(setup: bytes) -> Compute:
    target, argument = pickle.loads(setup)
    module, _, function = target.partition(":")
    compute: Compute = getattr(importlib.import_module(module), function)(argument)
    return compute


def _answer(compute: Compute, task: bytes) -> tuple[bytes, bytes]:
    try:
        return ANSWER, compute(task)
    except RequestError as error:
        return REFUSAL, pickle.dumps((error.code, error.message, error.field, error.retry_after))
    except MemoryError:
        return FAILURE, b"MemoryError"
    except Exception as error:
        # The message may quote what a client sent, which no log may hold.
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
        return FAILURE, f"{type(error).__name__} in {where}".encode()


def _receive(connection: socket.socket) -> bytes | None:
    """The next frame; None when the service is gone."""
    head = _read(connection, SIZE.size)
    return None if head is None else _read(connection, SIZE.unpack(head)[0])


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            return None
        at += count
    return bytes(data)


def _send(connection: socket.socket, kind: bytes, data: bytes) -> None:
    connection.sendall(HEAD.pack(len(data), kind))
    connection.sendall(data)


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # the service has ended
        main()
