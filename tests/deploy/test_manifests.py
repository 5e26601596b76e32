"""The manifests are valid, and agree with each other and with the server."""

from __future__ import annotations

import argparse
import copy
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.deploy import schemas
from tests.deploy.manifests import DEPLOY, PODS, Manifest, all_manifests, deployed_pod, manifest

from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.server.options.sources import add_flags, given, read_options
from moonpool.runtime.server.options.table import ServerOptions

pytestmark = pytest.mark.skipif(not DEPLOY.is_dir(), reason="only the tests are here, not the manifests")
MANIFESTS = dict(all_manifests())
EACH_POD = pytest.mark.parametrize("pod", PODS.values(), ids=PODS)


@pytest.fixture(scope="module")
def definitions() -> schemas.Schema:
    pytest.importorskip("pydantic")
    try:
        return schemas.all_schemas()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def complaints(manifest: Manifest, definitions: schemas.Schema, kind: str = "") -> list[str]:
    """Return what is wrong with a manifest, by the schema of its kind, or with a part of one."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = {**definitions, "$ref": f"#/$defs/{kind or schemas.name_of(manifest)}"}
    return [
        f"{error.json_path}: {error.message:.300}"
        for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    ]


# No package has the schema of KubeRay's objects; test_chart.py looks at their pods.
@pytest.mark.parametrize("name", [name for name in MANIFESTS if not name.startswith("ray/")])
@pytest.mark.promise(
    "Past one machine",
    "The manifests in `deploy/` are valid by the schemas of Kubernetes, KServe and KEDA, with no field that these do "
    "not know.",
)
def test_a_manifest_is_valid(name: str, definitions: schemas.Schema) -> None:
    assert complaints(MANIFESTS[name], definitions) == []


def _at(manifest: Manifest, path: str) -> tuple[Any, Any]:
    """Return the parent and the last key of a place such as `spec.triggers.0.type`."""
    *before, last = (int(key) if key.isdigit() else key for key in path.split("."))
    found: Any = manifest
    for key in before:
        found = found[key]
    return found, last


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec.template.spec.containers.0.readinesProbe", {}),
        ("Deployment", "spec.template.spec.terminationGracePeriodSeconds", "90s"),
        ("ClusterServingRuntime", "spec.supportedModelFormats.0.autoselect", True),
        ("ClusterServingRuntime", "spec.containers.0.livenessProbe.httpGet.paths", "/"),
        ("ClusterServingRuntime", "spec.protocolVersions", "v2"),
        ("InferenceService", "spec.predictor.model.storageURI", "s3://bucket"),
        ("InferenceService", "spec.predictor.autoScaling.metrics.0.external.metric.url", "x"),
        ("ScaledObject", "spec.maxReplicas", 10),
        ("ScaledObject", "spec.triggers.0.metadata.threshold", 8),
    ],
)
def test_a_manifest_with_a_wrong_field_is_not(kind: str, path: str, value: object, definitions: schemas.Schema) -> None:
    wrong = copy.deepcopy(manifest(kind))
    parent, key = _at(wrong, path)
    parent[key] = value

    assert complaints(wrong, definitions)


def test_objects_mean_the_same_pods() -> None:
    deployment = manifest("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    ports = {each["name"] for each in deployed_pod()["containers"][0]["ports"]}
    services = [each for each in MANIFESTS.values() if each["kind"] == "Service"]
    selected = [each["spec"]["selector"] for each in services] + [
        manifest(kind)["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")
    ]
    scaled = [manifest(kind)["spec"]["scaleTargetRef"]["name"] for kind in ("HorizontalPodAutoscaler", "ScaledObject")]

    assert [each for each in selected if each != labels] == []
    assert {port["targetPort"] for each in services for port in each["spec"]["ports"]} <= ports
    assert {*scaled} == {deployment["metadata"]["name"]}


def options_of(container: Manifest) -> ServerOptions:
    """Read a container's arguments as the server does."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_options(given(parser.parse_args(container["args"])), {})[0]


@EACH_POD
def test_the_server_knows_its_options(pod: Callable[[], Manifest]) -> None:
    (container,) = pod()["containers"]

    assert container["command"] == ["moonpool", "serve"]
    options = options_of(container)
    assert options.sandbox == "strict"
    assert options.strict_readiness is False


@EACH_POD
@pytest.mark.promise(
    "Past one machine", "The grace period of the pods is longer than everything that the end of the server may take."
)
def test_the_grace_period_is_longer_than_the_end(pod: Callable[[], Manifest]) -> None:
    spec = pod()
    (container,) = spec["containers"]
    waits = container["lifecycle"]["preStop"]["exec"]["command"]
    exit_timeout_s = options_of(container).exit_timeout_secs
    finalize_s = ModelOptions().finalize_timeout_s or 0.0

    assert waits[0] == "sleep"
    needed_s = float(waits[1]) + exit_timeout_s + finalize_s
    assert needed_s + 10 < spec["terminationGracePeriodSeconds"]


def queries() -> list[str]:
    """Return the questions to Prometheus."""
    (external, _) = manifest("InferenceService")["spec"]["predictor"]["autoScaling"]["metrics"]
    (prometheus, _) = manifest("ScaledObject")["spec"]["triggers"]
    return [prometheus["metadata"]["query"], external["external"]["metric"]["query"]]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
def test_prometheus_can_read_the_queries(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    lines = "".join(f"      - {{ record: 'a:b', expr: '{query}' }}\n" for query in queries())
    rules.write_text(f"groups:\n  - name: queries\n    rules:\n{lines}")
    checked = subprocess.run(["promtool", "check", "rules", str(rules)], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stderr


def test_all_scale_on_one_metric() -> None:
    (pods, _) = manifest("HorizontalPodAutoscaler")["spec"]["metrics"]
    names = {pods["pods"]["metric"]["name"]}
    names |= {name for query in queries() for name in re.findall(r"nv_\w+", query)}

    assert names == {"nv_inference_pending_request_count"}
