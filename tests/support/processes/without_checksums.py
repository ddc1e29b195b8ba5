"""The `pagewire` command without its check of checksums: damaged messages are parsed.

Run as a program, in place of pagewire.cli.main.
"""

from typing import Any

from pagewire.cli.main import main
from pagewire.rpc.checksums import ChecksumReader


def _parse_unchecked(self: "ChecksumReader[Any]", data: bytes) -> Any:
    return self._parse(data)


if __name__ == "__main__":
    ChecksumReader.deserialize = ChecksumReader.deserialize_or_error = _parse_unchecked  # type: ignore[method-assign]
    main()
