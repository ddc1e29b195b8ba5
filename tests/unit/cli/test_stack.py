"""The services of a stack, and its settings."""

from pathlib import Path

import pytest

from pagewire.cli.launch.stack import control_stack, stack_settings, temporary_stack
from pagewire.cli.settings.settings import settings_of
from pagewire.config import GatewayConfig, SchedulerConfig, WorkerConfig


def test_a_stack_has_all_settings_but_the_addresses_that_it_chooses() -> None:
    names = set(stack_settings())
    every = {n for c in (GatewayConfig, SchedulerConfig, WorkerConfig) for n in settings_of(c)}
    assert every - names == {"playground_socket", "schedulers", "worker_address"}
    assert stack_settings()["workers"].kind is int
    assert stack_settings()["workers"].env != settings_of(SchedulerConfig)["workers"].env


def test_environment_variables_are_unique_within_a_command() -> None:
    names = [s.env for s in stack_settings().values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("port", "ports"), [(9000, ["9000", "9001"]), (0, ["0", "0"]), (None, [None, None])]
)
def test_workers_have_metrics_ports_of_their_own(
    port: int | None, ports: list[str | None], tmp_path: Path
) -> None:
    values = temporary_stack(workers=2, worker_metrics_port=port, device="cpu")
    workers = control_stack(values, tmp_path).tiers[0]
    flag = "--worker-metrics-port="
    given = [
        next((word.removeprefix(flag) for word in worker.command if word.startswith(flag)), None)
        for worker in workers
    ]
    assert given == ports
