"""The containers of the manifests run: with their users, rights, file systems and ports, probed and ended as Kubernetes
does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.deploy.manifests import DEPLOY, PODS, Manifest
from tests.deploy.pod import can_run, run_pod

EXAMPLES = DEPLOY.parent / "examples" / "models"

pytestmark = [
    pytest.mark.skipif(not DEPLOY.is_dir(), reason="only the tests are here, not the manifests"),
    pytest.mark.skipif(not can_run(), reason="this user makes no containers"),
    pytest.mark.slow,
    pytest.mark.timeout(200),
]


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
@pytest.mark.promise(
    "Past one machine",
    "The containers of the manifests start with the user, rights and file system that they name, serve a model at "
    "`strict`, answer their probes, and end at SIGTERM within their grace period.",
)
def test_a_container_starts_serves_and_ends(pod: Callable[[], Manifest], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "primes").symlink_to(EXAMPLES / "primes")

    ended = run_pod(pod(), tmp_path)

    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert seen["is_live"]
    assert seen["answers"] == [[25], [25]]
    assert seen["health"] == 1
    assert seen["exit_code"] == 0
    assert 'nv_inference_pending_request_count{model="primes",version="1"} 0' in seen["metrics"]
    # As deploy/README.md says.
    assert seen["sandbox"]["level"] == "strict"
    left_out = {reason.partition(":")[0] for reason in seen["sandbox"]["left_out"]}
    assert left_out == {"namespaces", "own_user"}
