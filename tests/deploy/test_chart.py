"""The Helm chart makes the manifests, valid ones of other values, and refuses values that it does not know."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import yaml
from tests.deploy import schemas
from tests.deploy.manifests import DEPLOY, Manifest
from tests.deploy.test_manifests import complaints, definitions, options_of
from tests.programs import load_program

from moonpool.runtime.version import VERSION

__all__ = ["definitions"]
pytestmark = pytest.mark.skipif(not DEPLOY.is_dir(), reason="only the tests are here, not the chart")
EVERYTHING = {
    "imagePullSecrets[0].name": "secret",
    "models.claim": "",
    "models.repository": "s3://bucket/models",
    "args[0]": "--rate-limit=execution_count",
    "env[0].name": "A",
    "env[0].value": "b",
    "serviceAccountName": "reader",
    "resources.limits.nvidia\\.com/gpu": "1",
    "seconds.grace": "120",
    "autoscaling.by": "keda",
    "nodeSelector.pool": "gpus",
    "tolerations[0].key": "gpu",
    "tolerations[0].operator": "Exists",
    "tolerations[0].effect": "NoSchedule",
}


@pytest.fixture(scope="module")
def chart() -> ModuleType:
    """Return the program that renders the chart."""
    module = load_program(DEPLOY.parent / ".ci" / "manifests.py")
    if module.helm() is None:
        pytest.skip("there is no Helm: bash .ci/run schemas")
    return module


def objects(text: str) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(text) if each]


def pods(value: Any) -> Iterator[Manifest]:
    """Give the templates of pods in a manifest."""
    if isinstance(value, dict):
        if "spec" in value and "containers" in (value["spec"] or {}):
            yield value
        else:
            for each in value.values():
                yield from pods(each)
    elif isinstance(value, list):
        for each in value:
            yield from pods(each)


def test_the_manifests_are_the_chart_s(chart: ModuleType) -> None:
    made = dict(chart.manifests())

    assert {name: (DEPLOY / name).read_text(encoding="utf-8") for name in made} == made
    there = {str(path.relative_to(DEPLOY)) for path in DEPLOY.glob("*/*.yaml")}
    assert there - set(made) == {"helm/Chart.yaml", "helm/values.yaml"}


def test_helm_finds_no_fault(chart: ModuleType) -> None:
    checked = subprocess.run([chart.helm(), "lint", "--strict", chart.CHART], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stdout + checked.stderr
    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == VERSION


@pytest.mark.parametrize("kind", ["Deployment", "KServe"])
@pytest.mark.promise("Past one machine", "What the chart makes of any values that it takes is valid.")
def test_other_values_make_valid_manifests(chart: ModuleType, kind: str, definitions: schemas.Schema) -> None:
    for values in ({"kind": kind}, {"kind": kind, **EVERYTHING}):
        made = objects(chart.render(values))

        assert made
        assert [complaint for each in made for complaint in complaints(each, definitions)] == []


def test_the_pods_of_ray_are_valid(chart: ModuleType, definitions: schemas.Schema) -> None:
    for values in ({"kind": "Ray"}, {"kind": "Ray", **EVERYTHING}):
        (service,) = objects(chart.render(values))

        head, workers = pods(service)
        for each in (head, workers):
            assert complaints(each, definitions, "io.k8s.api.core.v1.PodTemplateSpec") == []


def test_values_reach_the_pod(chart: ModuleType) -> None:
    made = objects(chart.render({**EVERYTHING, "autoscaling.by": "", "replicas": "3"}))

    (deployment,) = (each for each in made if each["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 3
    assert {each["kind"] for each in made} == {"Deployment", "Service", "PodDisruptionBudget"}
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert options_of(container).rate_limit == "execution_count"
    assert "--model-repository=s3://bucket/models" in container["args"]
    assert [each["name"] for each in pod["volumes"]] == ["scratch"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["terminationGracePeriodSeconds"] == 120
    assert (pod["serviceAccountName"], pod["nodeSelector"]) == ("reader", {"pool": "gpus"})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "Pod"}, "kind"),
        ({"sandbx": "strict"}, "sandbx"),
        ({"sandbox": "none"}, "sandbox"),
        ({"args[0]": "serve"}, "args"),
        ({"autoscaling.by": "hand"}, "by"),
        ({"seconds.grace": "soon"}, "grace"),
        ({"models.claim": "null"}, "claim"),
    ],
    ids=lambda value: str(value),
)
def test_values_that_it_does_not_know_are_refused(chart: ModuleType, values: dict[str, str], words: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        chart.render(values)

    assert words in failed.value.stderr
