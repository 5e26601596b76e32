"""The suite's division among workers of pytest-xdist: a file stays together, and so do files that share servers.

Each worker has namespaces of its own (`spaces.py`). A machine may forbid them, as many containers do. Then there is one
worker, and the head of pytest's output says why.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import spaces

_NAMESPACES = pytest.StashKey[str]()
_OF_EACH_WORKER = "one of each kind for each worker"

# Each of these has a server, or a runtime, for a whole run, and loads its models.
WITH_SERVERS = (
    "tests/server/clients",
    "tests/server/hostile",
    "tests/triton",
    "tests/triton/backend",
    "tests/triton/core",
    "tests/triton/protocol",
)
# These units take so many seconds although their tests are few. They begin early, so no worker is left alone with one
# at the end.
SECONDS = {
    "tests/card/test_runner.py": 20,
    "tests/chaos/test_chaos.py": 35,
    "tests/chaos/test_chaos_served.py": 40,
    "tests/deploy/test_capabilities.py": 20,
    "tests/e2e/test_abuse_deaths.py": 30,
    "tests/e2e/test_children.py": 60,
    "tests/e2e/test_crash_matrix.py": 60,
    "tests/e2e/test_environments.py": 35,
    "tests/e2e/test_misbehaving_stub.py": 30,
    "tests/e2e/test_prefork.py": 50,
    "tests/e2e/test_sleep_hooks.py": 35,
    "tests/e2e/test_soak.py": 40,
    "tests/e2e/test_strange_contents.py": 120,
    "tests/e2e/test_supervision.py": 40,
    "tests/gpu/test_card_limits.py": 35,
    "tests/hostile/test_as_nobody.py": 170,
    "tests/hostile/test_ends.py": 20,
    "tests/hostile/test_granted_folders.py": 70,
    "tests/hostile/test_outliving.py": 20,
    "tests/ipc/test_codec.py": 45,
    "tests/benchmarks/commands/test_bench_hosts.py": 35,
    "tests/benchmarks/commands/test_bench_servers.py": 70,
    "tests/benchmarks/commands/test_bench_tls.py": 15,
    "tests/runtime/cli/test_main.py": 15,
    "tests/runtime/cli/test_offers.py": 40,
    "tests/benchmarks/commands/test_tune.py": 50,
    "tests/runtime/devices/test_callers.py": 25,
    "tests/runtime/lane/test_sanitized.py": 180,
    "tests/runtime/schedule/test_interrupts.py": 30,
    "tests/runtime/triton/test_codec.py": 20,
    "tests/runtime/triton/test_launcher.py": 50,
    "tests/runtime/triton/test_lent_stubs.py": 35,
    "tests/server/clients": 45,
    "tests/server/grpc/test_hostile.py": 30,
    "tests/server/page/test_hostile_pages.py": 140,
    "tests/server/page/test_page.py": 120,
    "tests/server/page/test_top.py": 25,
    "tests/server/test_cloud_repository.py": 40,
    "tests/server/test_hostile_repository.py": 20,
    "tests/server/test_serve.py": 50,
    "tests/server/test_serve_options.py": 40,
    "tests/server/test_serve_requests.py": 40,
    "tests/stub/peers/test_sanitized.py": 80,
    "tests/benchmarks/test_suites.py": 210,
    "tests/test_docs.py": 70,
    "tests/test_layout.py": 60,
    "tests/test_spaces.py": 30,
    "tests/testing/test_type_information.py": 15,
    "tests/triton": 60,
    "tests/triton/backend": 200,
    "tests/triton/overlay/test_overlay.py": 35,
    "tests/triton/protocol": 30,
    "tests/triton/sanitized/test_hostile_stub.py": 135,
    "tests/triton/sanitized/test_races.py": 40,
}
# The time of a test that is not listed.
SECONDS_OF_A_TEST = 0.15


def unit_of(nodeid: str) -> str:
    """Return the name of the unit that goes to one worker together with this test."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in WITH_SERVERS else file


def seconds_of(unit: str, tests: int) -> float:
    """About how long a unit of so many tests takes."""
    return max(SECONDS.get(unit, 0), SECONDS_OF_A_TEST * tests)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule as `--dist loadfile` does, but by units, and the longest first."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            longest = max(self.workqueue, key=lambda unit: seconds_of(unit, len(self.workqueue[unit])))
            self.workqueue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)


def give_namespaces(config: pytest.Config) -> None:
    """Choose the namespaces of this run: those of its workers, or of this process if it has none."""
    # A worker has this option, too, and says "no" here.
    if getattr(config.option, "dist", "no") == "no":
        chosen = _leave_shared_memory()
    elif why := _refusal():
        # Two workers would see each other's things.
        config.option.tx = config.option.tx[:1]
        chosen = f"none, so there is one worker ({why})"
    else:
        chosen = _OF_EACH_WORKER
    config.stash[_NAMESPACES] = chosen


def header(config: pytest.Config) -> str:
    return f"namespaces: {config.stash[_NAMESPACES]}"


def _leave_shared_memory() -> str:
    if spaces.INSIDE in os.environ:
        return "those of the process that started this one"
    try:
        spaces.leave_shared_memory()
    except OSError as error:
        return f"none ({error})"
    return "one for /dev/shm"


def _refusal() -> str:
    """Return why no program can be started in namespaces of its own; "" if one can."""
    tried = subprocess.run([*spaces.command(), "true"], stderr=subprocess.PIPE, text=True, check=False)
    return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Start each worker of this machine in namespaces of its own."""
    if config.stash[_NAMESPACES] != _OF_EACH_WORKER:
        return
    base: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    # The environments of other Pythons, which CI names, may lie among temporary files, too.
    others = filter(None, os.environ.get("MOONPOOL_TEST_ENVIRONMENTS", "").split(":"))
    needed = [str(base), str(config.rootpath), sys.prefix, sys.base_prefix, *sys.path, *others]
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.join([*spaces.command(needed), sys.executable])
