"""Asks the kernel to end this process with the worker, then executes the worker's program."""

import os
import sys

from pagewire.parent_process import end_with_parent


def main() -> None:
    """Arguments: the process id of the worker, then the command."""
    end_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")


if __name__ == "__main__":
    main()
