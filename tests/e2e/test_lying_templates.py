"""Tests of templates that lie. A template runs the model's code, so its messages about forks are checked."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tests.e2e.hosting import MODELS, Config, hosted, is_running, open_to_all, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.e2e.test_prefork import MARKS
from tests.inside import boot_with
from tests.waiting import wait_until

import moonpool
from moonpool import StubDied
from moonpool.runtime.stubs import template

pytestmark = [pytest.mark.slow]

LIAR = Path(__file__).parents[1] / "faults" / "lying_template.py"
FILE = MODELS / "preforked.py"
CONFIG: Config = {
    "input": [tensor("DO", "STRING", 1)],
    "output": [tensor("SAID", "STRING", 1)],
    **options(
        PREFORK="imports",
        ENVIRONMENT="MARKS, FAULT_BOOT, FAULT_IN_TEMPLATE",
        MAX_RESTARTS=3,
        RESTART_BACKOFF_S=0.01,
        FINALIZE_TIMEOUT_S=1,
    ),
}
# The log line about each lie.
LIES = {
    "forks nothing": "forked nothing that lived",
    "says nothing": "said nothing for 0.5 s",
    "says it is the child": "which is not a child of it",
    "forks a grandchild": "which is not a child of it",
    "tells an end that nobody asked for": "which was not requested",
    "sends a message of the runtime": "broke the protocol and was ended",
    "dies": "the template of model 'm' has ended: <process",
}


@pytest.fixture(scope="module")
def completes() -> bool:
    return True


@pytest.fixture(autouse=True)
def _instead_of_the_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all(*(tmp_path / name for name in MARKS))
    monkeypatch.setenv("MARKS", str(tmp_path))
    boot_with(LIAR, monkeypatch)


def ask(runtime: moonpool.Runtime, do: str = "") -> dict[str, int]:
    said: dict[str, int] = json.loads(runtime.infer("m", {"DO": [do]}, timeout_s=60.0)["SAID"][0])
    return said


def pids(runtime: moonpool.Runtime) -> list[int]:
    return [int(each["pid"]) for each in runtime.instances("m") if each["pid"]]


@pytest.mark.promise(
    "Forked instances",
    "If a template lies, is silent or dies, an instance is started without it. Its message "
    "about an end is only a line in the log.",
)
@pytest.mark.parametrize(("fault", "words"), LIES.items(), ids=list(LIES))
def test_where_a_template_lies_an_instance_is_started_without_it(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, words: str
) -> None:
    monkeypatch.setenv("FAULT_IN_TEMPLATE", fault)
    if fault == "says nothing":
        monkeypatch.setattr(template, "_FORK_S", 0.5)
    before = len(os.listdir("/proc/self/fd"))

    with hosted(runtime, "m", FILE, CONFIG):
        said = ask(runtime)
        assert said["parent"] == os.getpid()
        assert pids(runtime) == [said["pid"]]

    assert words in caplog.text
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.promise("Forked instances", "The kernel tells which process a …")
def test_one_process_is_not_taken_for_two_instances(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAULT_IN_TEMPLATE", "has one child speak for all")
    with hosted(runtime, "m", FILE, CONFIG, instances=2):
        assert len(set(pids(runtime))) == 2
        assert "which is another instance" in caplog.text
        everybody = pids(runtime)
    wait_until(lambda: not any(map(is_running, everybody)))


@pytest.mark.promise("Forked instances", "If a template lies, is …")
def test_a_wrong_exit_code_is_no_more_than_a_wrong_word(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_IN_TEMPLATE", "tells a wrong end")
    with hosted(runtime, "m", FILE, CONFIG):
        pid = pids(runtime)[0]
        with pytest.raises(StubDied, match="exited with 77"):
            ask(runtime, "exit 7")
        wait_until(lambda: pids(runtime) not in ([], [pid]), 60.0)
        assert ask(runtime)["pid"] != pid


@pytest.mark.promise("Forked instances", "If a template lies, is …")
def test_a_template_that_does_not_tell_an_end_delays_nobody_for_long(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_IN_TEMPLATE", "never tells an end")
    monkeypatch.setattr(template, "_REAP_S", 0.2)
    with hosted(runtime, "m", FILE, CONFIG):
        pid = pids(runtime)[0]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pids(runtime) not in ([], [pid]), 60.0)
        assert ask(runtime)["pid"] != pid
