"""The services of a stack, and its settings."""

from pathlib import Path
from typing import Any

import pytest

from pagewire.cli.errors import CommandError
from pagewire.cli.launch.stack import (
    control_stack,
    full_stack,
    model_settings,
    stack_settings,
    temporary_stack,
)
from pagewire.cli.launch.supervisor import Service
from pagewire.cli.settings.settings import settings_of
from pagewire.config import GatewayConfig, SchedulerConfig, WorkerConfig


def test_a_stack_has_all_settings_but_the_addresses_that_it_chooses() -> None:
    names = set(stack_settings())
    every = {n for c in (GatewayConfig, SchedulerConfig, WorkerConfig) for n in settings_of(c)}
    assert every - names == {
        "expected_models",
        "playground_socket",
        "schedulers",
        "worker_address",
    }
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


def two_models(**given: Any) -> dict[str, Any]:
    """The settings of a stack with the models `a`, on two workers, and `b`."""
    own = (
        {"model": "embedded", "served_model_name": "a", "workers": 2, "num_slots": 7},
        {"model": "embedded", "served_model_name": "b"},
    )
    return temporary_stack(**{"device": "cpu", "models": own, **given})


def flags_of(service: Service) -> dict[str, str]:
    """The flags of a service's command."""
    words = (word.partition("=") for word in service.command if word.startswith("--"))
    return {name: value for name, _, value in words}


def test_each_model_has_workers_and_a_scheduler_behind_one_gateway(tmp_path: Path) -> None:
    stack = full_stack(two_models(), tmp_path)
    workers, schedulers, [gateway] = stack.tiers
    names = [[service.name for service in tier] for tier in (workers, schedulers)]
    assert names == [["a/worker-0", "a/worker-1", "b/worker-0"], ["a/scheduler", "b/scheduler"]]
    assert [flags_of(each)["--served-model-name"] for each in workers] == ["a", "a", "b"]
    assert [flags_of(each)["--num-slots"] for each in workers] == ["7", "7", "256"]
    addresses = [flags_of(each)["--worker-address"] for each in workers]
    assert len(set(addresses)) == 3
    lists = [flags_of(each)["--workers"] for each in schedulers]
    assert lists == [",".join(addresses[:2]), addresses[2]]
    assert [model.name for model in stack.models] == ["a", "b"]
    given = flags_of(gateway)
    assert given["--schedulers"] == ",".join(model.grpc_address for model in stack.models)
    assert given["--expected-models"] == "a,b"
    assert {each.command[3] for each in workers} == {"worker"}
    assert {each.command[3] for each in schedulers} == {"scheduler"}


def test_a_single_model_has_the_services_that_it_always_had(tmp_path: Path) -> None:
    values = temporary_stack(device="cpu", workers=2, served_model_name="a, b")
    stack = full_stack(values, tmp_path)
    names = [[service.name for service in tier] for tier in stack.tiers]
    assert names == [["worker-0", "worker-1"], ["scheduler"], ["gateway"]]
    assert flags_of(stack.tiers[2][0])["--expected-models"] == "", "its name has a comma"
    assert [model.name for model in stack.models] == ["a, b"]


def test_services_of_several_models_have_ports_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.cli.launch.stack.claim_port", lambda host, port, flag: port)
    values = two_models(grpc_port=7000, worker_metrics_port=9000, scheduler_metrics_port=9100)
    workers, schedulers = control_stack(values, tmp_path).tiers
    assert [flags_of(each)["--worker-metrics-port"] for each in workers] == ["9000", "9001", "9002"]
    assert [flags_of(each)["--scheduler-metrics-port"] for each in schedulers] == ["9100", "9101"]
    assert [flags_of(each)["--grpc-port"] for each in schedulers] == ["7000", "7001"]


def test_several_schedulers_cannot_listen_on_one_socket(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="grpc_host unix:/x has room for the scheduler of one"):
        control_stack(two_models(grpc_host="unix:/x"), tmp_path)


def test_workers_of_several_models_share_gpus_and_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr("os.cpu_count", lambda: 10)
    workers = control_stack(two_models(device="cuda"), tmp_path).tiers[0]
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in workers] == ["4", "5", "6"]
    assert {flags_of(each)["--torch-threads"] for each in workers} == {"3"}


def test_a_model_has_no_settings_of_its_own_for_what_all_share() -> None:
    shared = {*settings_of(GatewayConfig), "model", "served_model_name", "grpc_port"}
    assert not shared & model_settings().keys()
    assert {"workers", "num_blocks", "dtype", "policy", "chat_template"} <= model_settings().keys()
