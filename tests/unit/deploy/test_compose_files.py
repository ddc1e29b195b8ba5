"""The compose file with the one of a second model: two models that share nothing but gateways."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FILES = ("docker-compose.yml", "deploy/compose/second-model.yml")
_VARIABLE = re.compile(r"\$\{\w+:[-?]([^}]*)\}")


def services(file: str) -> dict[str, Any]:
    """The services of a file, with the defaults of its variables."""
    text = _VARIABLE.sub(r"\1", (ROOT / file).read_text())
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def merged() -> dict[str, dict[str, str]]:
    """The environment of each service, as Compose merges `extends` and both files."""
    base, second = map(services, FILES)
    found = {name: dict(service.get("environment", {})) for name, service in base.items()}
    for name, service in second.items():
        extended = service.get("extends", {})
        if extended:
            assert extended["file"] == FILES[0]
            found[name] = dict(found[extended["service"]])
        found[name] |= service["environment"]
    return found


def hosts(addresses: str) -> list[str]:
    """The services in a list of addresses."""
    return [address.removeprefix("dns:").partition(":")[0] for address in addresses.split(",")]


def check_apart(environments: dict[str, dict[str, str]]) -> None:
    """The gateway has every scheduler and every name; a scheduler has its model's workers."""
    gateway = environments["gateway"]
    schedulers = hosts(gateway["PAGEWIRE_SCHEDULERS"])
    assert schedulers == [name for name in environments if name.startswith("scheduler")]
    names = [environments[name]["PAGEWIRE_SERVED_MODEL_NAME"] for name in schedulers]
    assert gateway["PAGEWIRE_EXPECTED_MODELS"].split(",") == names
    assert len(set(names)) == len(names) == 2
    workers = [environments[name]["PAGEWIRE_WORKERS"] for name in schedulers]
    assert len(set(workers)) == 2
    for scheduler, addresses in zip(schedulers, workers, strict=True):
        [worker] = hosts(addresses)
        for name in ("PAGEWIRE_MODEL", "PAGEWIRE_SERVED_MODEL_NAME"):
            assert environments[worker][name] == environments[scheduler][name]


def test_two_models_have_services_of_their_own() -> None:
    check_apart(merged())


def test_workers_on_gpus_have_the_name_of_the_first_model() -> None:
    environments = merged()
    name = environments["scheduler"]["PAGEWIRE_SERVED_MODEL_NAME"]
    on_gpus = [environments[each] for each in environments if each.startswith("worker-gpu")]
    assert [each["PAGEWIRE_SERVED_MODEL_NAME"] for each in on_gpus] == [name] * 2


@pytest.mark.parametrize("command", [["docker-compose"], ["docker", "compose"]], ids=["v1", "v2"])
def test_compose_reads_both_files_so(command: list[str]) -> None:
    if (
        shutil.which(command[0]) is None
        or subprocess.run([*command, "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"{' '.join(command)} is not installed")
    files = [word for file in FILES for word in ("-f", file)]
    done = subprocess.run(
        [*command, *files, "--profile", "cpu", "config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)["services"]
    environments = {name: service.get("environment", {}) for name, service in found.items()}
    check_apart({name: environments[name] for name in merged() if name in environments})
    for name in ("scheduler", "worker"):
        assert found[f"{name}-2"]["build"] == found[name]["build"]
        assert found[f"{name}-2"]["healthcheck"] == found[name]["healthcheck"]
