"""The Kubernetes manifests: valid by the API's schemas, and in agreement with each other and the
settings."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pagewire.config import GatewayConfig, SchedulerConfig, WorkerConfig

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
# The oldest release with the fields in use, and the newest with schemas.
VERSIONS = ("1.31", kubernetes_validate.latest_version())
# The command line reads these besides the settings.
ENVIRONMENT = {
    "PAGEWIRE_API_KEYS",
    "PAGEWIRE_SCHEDULER_TOKEN",
    "PAGEWIRE_WORKER_TOKEN",
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
}

Manifest = dict[str, Any]


def manifests(folder: Path = FOLDER) -> Iterator[tuple[str, Manifest]]:
    """Every object, with the name of its file, in a fixed order."""
    for path in sorted(folder.rglob("*.yaml")):
        if path.name == "kustomization.yaml":
            continue
        for manifest in yaml.safe_load_all(path.read_text()):
            yield f"{path.relative_to(FOLDER)}:{manifest['kind']}", manifest


ALL = list(manifests())


def check_by_schema(manifest: Manifest, version: str) -> None:
    """Raises an error if an object is not valid, or has fields that its schema does not have."""
    schema = SCHEMAS / f"{manifest['apiVersion'].replace('/', '_')}_{manifest['kind']}.json"
    if schema.exists():
        assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(manifest["spec"], json.loads(schema.read_text()))
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", [pytest.param(each, id=name) for name, each in ALL])
def test_every_manifest_is_valid(manifest: Manifest, version: str) -> None:
    check_by_schema(manifest, version)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "replicas"), "two"),
        ("StatefulSet", ("spec", "servicename"), "scheduler"),
        ("HorizontalPodAutoscaler", ("spec", "maxReplicas"), None),
        ("NetworkPolicy", ("spec", "podSelector"), []),
        ("InferencePool", ("spec", "targetPortNumber"), 8000),
        ("ServiceMonitor", ("spec", "endpoints"), []),
    ],
)
def test_the_check_can_fail(kind: str, path: tuple[str, str], value: object) -> None:
    manifest = next(each for _, each in ALL if each["kind"] == kind)
    changed = json.loads(json.dumps(manifest))
    changed[path[0]][path[1]] = value
    errors = (kubernetes_validate.ValidationError, jsonschema.ValidationError)
    with pytest.raises(errors):
        check_by_schema(changed, VERSIONS[-1])


@pytest.mark.parametrize("folder", ["base", "monitoring", "inference-pool"])
def test_a_kustomization_has_every_file_of_its_folder(folder: str) -> None:
    listed = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())["resources"]
    found = {path.name for path in (FOLDER / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == found


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")
@pytest.mark.parametrize("folder", ["base", "monitoring", "inference-pool"])
def test_kubectl_builds_it(folder: str) -> None:
    built = built_by_kubectl(folder)
    assert len(built) == len(list(manifests(FOLDER / folder)))
    for manifest in built:
        assert manifest["metadata"]["namespace"] == "pagewire"
        check_by_schema(manifest, VERSIONS[-1])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")
def test_the_example_changes_images_and_model_alone() -> None:
    base, example = built_by_kubectl("base"), built_by_kubectl("example")
    for manifest in example:
        if manifest["kind"] == "ConfigMap":
            assert manifest["data"]["PAGEWIRE_MODEL"] == "Qwen/Qwen3-0.6B"
            manifest["data"]["PAGEWIRE_MODEL"] = "embedded"
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            container = container_of(manifest)
            registry, image = container["image"].split("/")
            assert registry == "registry.example"
            manifest["spec"]["template"]["spec"]["containers"] = [{**container, "image": image}]
    assert example == base


def built_by_kubectl(folder: str) -> list[Manifest]:
    command = ["kubectl", "kustomize", str(FOLDER / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(*kinds: str) -> list[Manifest]:
    return [each for _, each in ALL if each["kind"] in kinds]


WORKLOADS = of_kind("Deployment", "StatefulSet")
OURS = [each for each in WORKLOADS if each["metadata"]["name"] != "endpoint-picker"]


def labels_of(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def selected(selector: dict[str, str]) -> list[Manifest]:
    return [each for each in WORKLOADS if selector.items() <= labels_of(each).items()]


def container_of(workload: Manifest) -> Manifest:
    [container] = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


def ports_of(workload: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(workload)["ports"]}


def test_every_selector_finds_the_workload_of_its_name() -> None:
    assert {each["metadata"]["name"] for each in OURS} == {"gateway", "scheduler", "worker"}
    for each in WORKLOADS:
        assert selected(each["spec"]["selector"]["matchLabels"]) == [each]
    for service in of_kind("Service"):
        [found] = selected(service["spec"]["selector"])
        assert found["metadata"]["name"] == service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_of(found)
    for budget in of_kind("PodDisruptionBudget"):
        [found] = selected(budget["spec"]["selector"]["matchLabels"])
        assert found["metadata"]["name"] == budget["metadata"]["name"]
    for policy in of_kind("NetworkPolicy"):
        [found] = selected(policy["spec"]["podSelector"]["matchLabels"])
        assert found["metadata"]["name"] == policy["metadata"]["name"]
    [pool] = of_kind("InferencePool")
    [found] = selected(pool["spec"]["selector"]["matchLabels"])
    assert pool["spec"]["targetPorts"] == [{"number": ports_of(found)["http"]}]
    [autoscaler] = of_kind("HorizontalPodAutoscaler")
    target = autoscaler["spec"]["scaleTargetRef"]
    [scaled] = [each for each in OURS if each["metadata"]["name"] == target["name"]]
    assert scaled["kind"] == target["kind"]
    assert "replicas" not in scaled["spec"], "both would set it"


def test_policies_allow_what_services_need_and_no_more() -> None:
    """The allowed clients of each port, by the policies of the receiving side."""
    allowed = set()
    for policy in of_kind("NetworkPolicy"):
        name = policy["metadata"]["name"]
        for rule in policy["spec"]["ingress"]:
            for port in rule["ports"]:
                for peer in rule.get("from", [{}]):
                    selector = peer.get("podSelector") or peer.get("namespaceSelector") or {}
                    labels = selector.get("matchLabels", {"": "anyone"})
                    allowed |= {(next(iter(labels.values())), name, port["port"])}
    assert allowed == {
        ("anyone", "gateway", "http"),
        ("gateway", "scheduler", "grpc"),
        ("true", "scheduler", "grpc"),
        ("scheduler", "worker", "grpc"),
        ("endpoint-picker", "gateway", "metrics"),
        ("monitoring", "gateway", "metrics"),
        ("monitoring", "scheduler", "metrics"),
        ("monitoring", "worker", "metrics"),
    }


@pytest.mark.parametrize("workload", OURS, ids=lambda each: str(each["metadata"]["name"]))
def test_a_pod_drains_within_its_grace_period(workload: Manifest) -> None:
    [settings] = of_kind("ConfigMap")
    pod = workload["spec"]["template"]["spec"]
    hook = container_of(workload).get("lifecycle", {}).get("preStop", {})
    sleeps = int(hook["exec"]["command"][1]) if hook else 0
    drains = float(settings["data"]["PAGEWIRE_DRAIN_TIMEOUT"])
    assert sleeps + drains + 10 <= pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("workload", OURS, ids=lambda each: str(each["metadata"]["name"]))
def test_a_pod_has_probes_and_no_rights(workload: Manifest) -> None:
    container = container_of(workload)
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    pod = workload["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"], "a Service named pagewire would set PAGEWIRE_PORT"


def test_every_variable_is_a_setting() -> None:
    known = ENVIRONMENT | {
        f"PAGEWIRE_{field.name.upper()}"
        for config in (GatewayConfig, SchedulerConfig, WorkerConfig)
        for field in fields(config)
    }
    [settings] = of_kind("ConfigMap")
    used = set(settings["data"])
    for workload in OURS:
        used |= {variable["name"] for variable in container_of(workload)["env"]}
    for file in (ROOT / "docker-compose.yml", *(ROOT / "deploy/compose").glob("*.yml")):
        for service in yaml.safe_load(file.read_text())["services"].values():
            environment = service.get("environment", {})
            used |= {name for name in environment if name.startswith(("PAGEWIRE_", "HF_"))}
    assert used - known == set()
    assert {"PAGEWIRE_SHARE_WORKERS", "PAGEWIRE_WORKERS", "PAGEWIRE_SCHEDULERS"} <= used


def test_each_worker_has_a_gpu_of_its_own() -> None:
    [worker] = [each for each in OURS if each["metadata"]["name"] == "worker"]
    resources = container_of(worker)["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 1
