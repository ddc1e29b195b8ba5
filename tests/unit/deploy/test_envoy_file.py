"""What Envoy's configuration holds against a gateway or scheduler."""

from pathlib import Path

import yaml

CONFIG = Path(__file__).parents[3] / "deploy" / "envoy" / "envoy.yaml"


def test_statuses_eject_no_server() -> None:
    """With Envoy's defaults ten requests with a `deadline_ms` of 1, each a 504, eject a gateway."""
    clusters = yaml.safe_load(CONFIG.read_text())["static_resources"]["clusters"]
    assert [cluster["name"] for cluster in clusters] == ["gateways", "schedulers"]
    for cluster in clusters:
        outliers = cluster["outlier_detection"]
        assert outliers["split_external_local_origin_errors"] is True
        # These are on by default. Without the split they would count broken connections, too.
        assert outliers["enforcing_consecutive_5xx"] == 0
        assert outliers["enforcing_success_rate"] == 0
        assert outliers["consecutive_local_origin_failure"] > 0
