"""The imports of the command line before it selects a command."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("grpc", "a service sets gRPC's experiments before its first import"),
        ("torch", "only a worker needs it, and its import takes seconds"),
        ("fastapi", "only a gateway's image has it"),
    ],
)
def test_the_command_line_imports_none_of_a_services_packages(package: str, reason: str) -> None:
    program = f"import pagewire.cli.main, sys; sys.exit({package!r} in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], check=False)
    assert ended.returncode == 0, f"{package} is imported: {reason}"
