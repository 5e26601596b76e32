"""The sandbox, in containers with the rights that deploy/README.md names, and without each of them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from tests.deploy.manifests import DEPLOY, Manifest
from tests.deploy.pod import can_run, run_pod

PAGE = (DEPLOY / "README.md").read_text(encoding="utf-8") if DEPLOY.is_dir() else ""
ROOT = {"runAsUser": 0, "runAsGroup": 0}
# The part of `moonpool sandbox` that loads a model.
TRY = """
import json
from moonpool.runtime.cli.sandbox import try_strict
tried = try_strict()
print(json.dumps([tried.why, [reason.partition(":")[0] for reason in tried.left_out]]))
"""

pytestmark = [
    pytest.mark.skipif(not PAGE, reason="only the tests are here, not the page"),
    pytest.mark.skipif(not can_run(), reason="this user makes no containers"),
    pytest.mark.slow,
    pytest.mark.timeout(200),
]


def rows() -> list[tuple[str, set[str]]]:
    """Return what each line of the table takes away, and the layers that are missing then."""
    table = PAGE.partition("| without | `strict` goes without |")[2].partition("\n\n")[0]
    found = re.findall(r"(?m)^\| (`\w+`|all of them) \| (.+?) \|", table)
    return [(name.strip("`"), set(re.findall(r"`(\w+)`", layers))) for name, layers in found]


def left_out(security: Manifest, folder: Path) -> set[str]:
    """Return the layers that `strict` goes without in such a container."""
    program = [sys.executable, "-c", TRY]
    ended = run_pod({"containers": [{"command": program, "securityContext": security}]}, folder)
    assert ended.returncode == 0, ended.stderr
    why, layers = json.loads(ended.stdout.splitlines()[-1])
    assert why == ""
    return set(layers)


@pytest.mark.promise(
    "Past one machine",
    "`strict` works for root whatever capability a container takes away, and goes without the layers that the table in "
    "`deploy/README.md` names.",
)
@pytest.mark.parametrize(("name", "layers"), rows())
def test_without_a_capability_strict_goes_without_what_the_page_says(
    name: str, layers: set[str], tmp_path: Path
) -> None:
    dropped = "ALL" if name == "all of them" else name

    assert left_out({**ROOT, "capabilities": {"drop": [dropped]}}, tmp_path) == layers


def test_with_all_capabilities_nothing_is_missing(tmp_path: Path) -> None:
    assert left_out(ROOT, tmp_path) == set()


def test_a_pod_with_the_five_capabilities_has_users(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\nsecurityContext:\n(.*?)```", PAGE, re.DOTALL)
    security = yaml.safe_load(block)
    # Its volume for /run is in the image's file system here.
    del security["readOnlyRootFilesystem"]
    security |= {"runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}}

    assert left_out(security, tmp_path) == {"namespaces"}
