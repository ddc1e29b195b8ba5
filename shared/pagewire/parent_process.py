"""Ends a process when its parent ends. Linux only: elsewhere it has no effect."""

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "PAGEWIRE_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, for any reason.

    Ends this process at once if the process `parent` has already ended.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def end_with_supervisor() -> None:
    """Calls `end_with_parent` for a process that has PARENT_VARIABLE in its environment."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        end_with_parent(int(parent))
