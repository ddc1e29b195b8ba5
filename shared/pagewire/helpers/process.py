"""A helper process: answers one task after the other until its service closes the connection.

    python -m pagewire.helpers.process FD

FD is one end of a socket pair. Messages are frames: the size as eight little-endian bytes, then
this many bytes. The first frame from the service has the pickled target and argument (see
HelperPool). Each later frame is a task. A frame to the service has a byte for its kind after the
size.
"""

import contextlib
import gc
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
from pagewire.parent_process import end_with_parent

SIZE = struct.Struct("<Q")
HEAD = struct.Struct("<Qc")
READY, ANSWER, REFUSAL, FAILURE = b"R", b"A", b"E", b"F"

# A lower priority than the service's event loop, which matters on a machine with few CPUs.
_NICE = 5

Compute = Callable[[bytes], bytes]


def main() -> None:
    """Answers tasks until the connection ends."""
    # A signal to the process group is for the service, which drains and then ends its helpers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    end_with_parent(os.getppid())
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        setup = _receive(connection)
        if setup is None:
            return
        compute = _load(setup)
        _send(connection, READY, b"")
        while (task := _receive(connection)) is not None:
            _send(connection, *_answer(compute, task))


def _load(setup: bytes) -> Compute:
    # The imported objects are many and never freed: collections would only read them again.
    gc.disable()
    target, argument = pickle.loads(setup)
    module, _, function = target.partition(":")
    compute: Compute = getattr(importlib.import_module(module), function)(argument)
    gc.freeze()
    gc.enable()
    return compute


def _answer(compute: Compute, task: bytes) -> tuple[bytes, bytes]:
    try:
        return ANSWER, compute(task)
    except RequestError as error:
        parts = (error.code, error.message, error.field, error.retry_after, error.reason)
        return REFUSAL, pickle.dumps(parts)
    except MemoryError:
        return FAILURE, b"MemoryError"
    except Exception as error:
        # The exception's message may quote a client's input, which must not be logged.
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
        return FAILURE, f"{type(error).__name__} in {where}".encode()


def _receive(connection: socket.socket) -> bytes | None:
    """The next frame; None when the service has closed the connection."""
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
