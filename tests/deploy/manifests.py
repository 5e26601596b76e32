"""The manifests in deploy/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
Manifest = dict[str, Any]


def all_manifests() -> Iterator[tuple[str, Manifest]]:
    """Give each manifest, with a name for people."""
    for path in sorted(DEPLOY.glob("*/*.yaml")):
        if path.parent.name == "helm":  # values
            continue
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield f"{path.parent.name}/{manifest['kind']}/{manifest['metadata']['name']}", manifest


def manifest(kind: str) -> Manifest:
    """Return the first manifest of a kind."""
    return next(each for _, each in all_manifests() if each["kind"] == kind)


def deployed_pod() -> Manifest:
    """Return the specification of the pods of the Deployment."""
    pod: Manifest = manifest("Deployment")["spec"]["template"]["spec"]
    return pod


def kserve_pod() -> Manifest:
    """Return the specification of the pods that KServe makes of the runtime and the service, but for what it adds."""
    runtime = manifest("ClusterServingRuntime")["spec"]
    predictor = manifest("InferenceService")["spec"]["predictor"]
    (container,) = runtime["containers"]
    return {
        "terminationGracePeriodSeconds": predictor["terminationGracePeriodSeconds"],
        "volumes": runtime["volumes"],
        "containers": [{**container, "ports": predictor["model"]["ports"]}],
    }


PODS = {"Deployment": deployed_pod, "KServe": kserve_pod}
