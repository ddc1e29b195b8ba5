"""Runs the services of the compose file."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagewire.cli.launch.ports import free_port

ROOT = Path(__file__).parents[2]
# Some machines cannot reach an image registry; a script beside the repository may start an engine
# with the base images there.
ENGINE_SCRIPT = ROOT.parent / "shared" / "tools" / "docker-engine"


@contextmanager
def engine() -> Iterator[str | None]:
    """A Docker engine with Compose. Yields None, or the reason why none is available."""
    reason = _missing()
    if reason is None:
        yield None
    elif not ENGINE_SCRIPT.is_file():
        yield reason
    else:
        subprocess.run([str(ENGINE_SCRIPT)], check=True)
        try:
            yield _missing()
        finally:
            subprocess.run([str(ENGINE_SCRIPT), "stop"], check=False)


def _missing() -> str | None:
    if shutil.which("docker") is None:
        return "docker is not installed"
    info = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if info.returncode != 0:
        return f"no Docker engine answers: {info.stderr.strip().splitlines()[-1:]}"
    if _compose_command() is None:
        return "neither `docker compose` nor docker-compose is installed"
    return None


def _compose_command() -> list[str] | None:
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


class ComposeStack:
    """The services of the compose file, with their own project name and ports."""

    def __init__(self) -> None:
        command = _compose_command()
        assert command is not None
        self.http_port, self.grpc_port = free_port(), free_port()
        self._project = f"pagewire-test-{os.getpid()}"
        self._command = [*command, "-p", self._project, "-f", str(ROOT / "docker-compose.yml")]
        self._environment = {
            **os.environ,
            "HTTP_PORT": str(self.http_port),
            "GRPC_PORT": str(self.grpc_port),
            "COMPOSE_PROFILES": "cpu",
        }

    def run(self, *arguments: str) -> str:
        """Runs a Compose command; returns its output. AssertionError if it fails."""
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def scale(self, **services: int) -> None:
        """Starts or stops containers until each service has this many; the others stay."""
        numbers = [f"--scale={name}={number}" for name, number in services.items()]
        self.run("up", "-d", "--no-recreate", "--no-build", *numbers)

    def containers(self, service: str) -> list[str]:
        """The running containers of a service, by name."""
        labels = [f"project={self._project}", f"service={service}"]
        filters = [f"--filter=label=com.docker.compose.{label}" for label in labels]
        names = _docker("ps", "--format={{.Names}}", *filters).split()
        return sorted(names)

    def docker(self, *arguments: str) -> str:
        """Runs a command of the engine; returns its output."""
        return _docker(*arguments)

    def health(self) -> dict[str, str]:
        """The health of each container; `stopped` if it does not run."""
        states = {}
        for container in self._containers():
            [details] = json.loads(_docker("inspect", container))
            running = details["State"]["Running"]
            name = details["Name"].removeprefix("/")
            states[name] = details["State"]["Health"]["Status"] if running else "stopped"
        return states

    def _containers(self) -> list[str]:
        label = f"label=com.docker.compose.project={self._project}"
        return _docker("ps", "--all", "--quiet", "--filter", label).split()

    def wait_healthy(self, seconds: float) -> None:
        """Waits until every service is healthy; AssertionError with the logs otherwise."""
        deadline = time.monotonic() + seconds
        while set(self.health().values()) != {"healthy"}:
            assert time.monotonic() < deadline, f"{self.health()}\n{self.logs()}"
            time.sleep(1)

    def logs(self) -> str:
        """The last lines of every service."""
        return self.run("logs", "--no-color", "--tail", "30")


def _docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True)
    return done.stdout
