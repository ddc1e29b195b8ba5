"""Prometheus's rules, Grafana's dashboard and their services in the compose file."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from tools import dashboard
from tools.metrics_page import Described, described

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy/observability/prometheus"
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
# Labels that Prometheus adds, and names from its client library in every process.
TARGET_LABELS = {"job", "instance", "le"}
OF_EVERY_PROCESS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}


def series() -> dict[str, Described]:
    return {name: row for row in described() for name in row.series}


EXPRESSIONS = [*dashboard.expressions(), *(rule["expr"] for rule in RULES)]


@pytest.fixture(scope="module")
def known() -> dict[str, Described]:
    return series()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_name_metrics_and_labels_that_exist(
    known: dict[str, Described], expression: str
) -> None:
    found = re.findall(r"\b(pagewire_\w+|vllm:\w+|process_\w+|up)\b(?:\{([^}]*)\})?", expression)
    assert found, "an expression without a metric"
    labels = set(TARGET_LABELS)
    for name, matchers in found:
        assert name in known or name in OF_EVERY_PROCESS, name
        own = set(known[name].labels) if name in known else set()
        labels |= own
        for label in re.findall(r"(\w+)\s*[=!]", matchers):
            assert label in own | TARGET_LABELS, (name, label)
    for grouped in re.findall(r"\b(?:by|ignoring|on) ?\(([^)]*)\)", expression):
        assert {label.strip() for label in grouped.split(",")} <= labels, expression


def test_each_alert_says_what_it_means_and_what_to_do() -> None:
    assert len(RULES) == len({rule["alert"] for rule in RULES}) > 8
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


@pytest.mark.parametrize("expression", [e for e in EXPRESSIONS if "gateway_requests" in e])
def test_requests_are_those_of_clients(expression: str) -> None:
    """Probes and scrapes are requests, too: their successes would hide the failures of others."""
    counts = expression.count("pagewire_gateway_requests_total")
    assert expression.count('pagewire_gateway_requests_total{route=~"/v1/.+"') == counts


def test_no_scheduler_at_all_is_no_worker() -> None:
    """Addresses come from DNS: a service without containers has no series, not even up."""
    [rule] = [rule for rule in RULES if rule["alert"] == "PagewireNoWorkers"]
    assert "or vector(0)" in rule["expr"]


def promtool(*arguments: str | Path) -> str:
    beside = Path(sys.executable).parent / "promtool"
    tool = str(beside) if beside.is_file() else shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool, of Debian's package prometheus, is not installed")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_configuration() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "config", PROMETHEUS / "prometheus.yml")


def test_alerts_fire_when_they_should_and_not_at_rest() -> None:
    assert "SUCCESS" in promtool("test", "rules", PROMETHEUS / "alerts_test.yml")


def test_promtool_parses_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    queries = [query.replace("$__rate_interval", "1m") for query in dashboard.expressions()]
    rules = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(queries)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


def test_the_dashboard_is_that_of_the_table() -> None:
    assert dashboard.PAGE.read_text() == dashboard.text(), f"run {dashboard.COMMAND}"
    places = [tuple(panel["gridPos"].values()) for panel in dashboard.dashboard()["panels"]]
    assert len(places) == len(set(places))


def lost(written: Any, read: Any, path: str = "") -> list[str]:
    """The paths of differences after Grafana's model has read the dashboard."""
    if isinstance(written, dict):
        pairs = [(f"{path}.{key}", value, read.get(key)) for key, value in written.items()]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        both = enumerate(zip(written, read, strict=True))
        pairs = [(f"{path}[{n}]", mine, theirs) for n, (mine, theirs) in both]
    else:
        return [] if written == read else [path]
    return [each for where, mine, theirs in pairs for each in lost(mine, theirs, where)]


def read_by_grafanas_model(written: dict[str, Any]) -> Any:
    plugins.register_default_plugins()
    return json.loads(json.dumps(Dashboard.from_json(written), cls=JSONEncoder))


def test_grafanas_model_knows_all_of_the_dashboard() -> None:
    """Grafana itself has no package: this is its schema in its client library."""
    written = dashboard.dashboard()
    assert lost(written, read_by_grafanas_model(written)) == []
    written["panels"][1]["fieldConfig"]["defaults"]["unti"] = "s"
    assert lost(written, read_by_grafanas_model(written)) == [
        ".panels[1].fieldConfig.defaults.unti"
    ]


def test_compose_has_both_services_in_a_profile_of_their_own() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    sources = yaml.safe_load(
        (ROOT / "deploy/observability/grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    assert [source["uid"] for source in sources] == [dashboard.SOURCE["uid"]]
    for name in ("prometheus", "grafana"):
        service = compose["services"][name]
        assert service["profiles"] == ["observability"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            named = compose["volumes"] if not source.startswith(".") else {}
            assert source in named or (ROOT / source).exists(), volume


def test_prometheus_scrapes_every_service_where_compose_has_its_metrics() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    targets = {
        name: config["port"]
        for job in jobs
        for config in job["dns_sd_configs"]
        for name in config["names"]
    }
    assert {job["job_name"] for job in jobs} == set(targets) == {"gateway", "scheduler", "worker"}
    for name, port in targets.items():
        environment = compose[name]["environment"]
        assert environment[f"PAGEWIRE_{name.upper()}_METRICS_PORT"] == port
        assert environment["PAGEWIRE_METRICS_HOST"] == "0.0.0.0"


@pytest.mark.parametrize("command", [["docker-compose"], ["docker", "compose"]], ids=["v1", "v2"])
def test_compose_accepts_the_file_with_the_profile(command: list[str]) -> None:
    if (
        shutil.which(command[0]) is None
        or subprocess.run([*command, "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"{' '.join(command)} is not installed")
    done = subprocess.run(
        [*command, "--profile", "observability", "config", "--services"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"prometheus", "grafana"} <= set(done.stdout.split())
