"""Ties the life of a process to its parent's."""

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "PAGEWIRE_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, however the parent ends.

    For processes started with PARENT_VARIABLE in their environment. Linux only: elsewhere a
    supervisor that is killed without a chance to clean up leaves its children behind.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have ended before the call above.
    if os.getppid() != int(parent):
        os._exit(1)
