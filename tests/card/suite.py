"""Tests of a file that need a card:   python -m tests.card.suite FILE WORKERS

The cases run in workers of pytest-xdist, so that one that hangs or breaks its context costs a worker and not the file.
Each result is on the disk before the next case begins. Where the plug-ins for that are missing, pytest does without.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import pytest
from tests import leaks
from tests.card import results

# A case that takes longer hangs. Its worker ends, with the stacks of its threads in the log, and another one goes on.
_CASE_S = results.limit_s() / 2.5
# After this time, what a case has left is a failure.
_GRACE_S = results.limit_s() / 20


class _Recorder:
    """Writes down each result as it arrives from a worker."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._is_counted = False

    def _count(self, cases: int) -> None:
        if not self._is_counted:
            self._is_counted = True
            results.record(f"{self._file}: cases", cases > 0, cases)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._count(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._count(len(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            results.record(report.nodeid, False, text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # What ends the whole process, or its time, has begun last in the log.
        sys.stdout.write(f"begins {nodeid}\n")
        sys.stdout.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        # A worker that is gone reports no part of its case.
        part = f" ({report.when})" if report.when in ("setup", "teardown") else ""
        name = f"{report.nodeid}{part}"
        ok = None if report.skipped else report.passed
        text = "" if report.passed else _words_of(report)
        results.record(name, ok, round(report.duration, 3), "s", f"at most {_CASE_S:.0f}", text)


def _words_of(report: pytest.TestReport) -> str:
    """Return why a case failed or was skipped: the end of the text, where pytest says it."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E")]
    return "\n".join(lines) or report.longreprtext[-1000:]


def pytest_configure(config: pytest.Config) -> None:
    # A driver may keep what no other driver has kept. To wait for it after each case would cost the others their time.
    leaks.GRACE_S = min(leaks.GRACE_S, _GRACE_S)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config.args[0]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each case its limit, and run every tenth one in a tenth of the usual time."""
    if config.pluginmanager.hasplugin("timeout"):
        # Whatever a case is given elsewhere. A thread ends what waits within the driver, where no signal is seen.
        for item in items:
            item.add_marker(pytest.mark.timeout(_CASE_S, method="thread"), append=False)
    every = round(1 / results.share())
    left_out = [item for number, item in enumerate(items) if number % every]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = items[::every]


def _workers(wanted: int) -> list[str]:
    """Return the options for so many workers. A tenth of the time is too short for a second process of each file."""
    if importlib.util.find_spec("xdist") is None:
        return []
    workers = int(wanted * max(results.share(), 1 / 4))
    # As it is, the fifth worker that a case ends would be the last one.
    restarts = "--max-worker-restart=1000"
    return ["-n", str(min(workers, len(os.sched_getaffinity(0)))), restarts]


def main(file: str, workers: int) -> Any:
    # Libraries of the machine may warn of each other's old names, which is no failure there.
    status = pytest.main(
        [
            file, "-m", "gpu", "-p", "tests.card.suite", "-p", "no:cacheprovider", "-W", "default",
            "--continue-on-collection-errors", "--durations=10", *_workers(workers),
        ]
    )  # fmt: skip
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        results.record(f"{file}: cases", False, 0, text="there are none for a card")
    # What failed is recorded, and is no failure of this process.
    failed = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    return 0 if status in failed else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1))
