"""Tests of instances that are forked from a template of their model."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, is_running, open_to_all, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.waiting import Deadline, wait_until

import moonpool
from moonpool import LoadFailed, ModelError, ModelUnavailable, StubDied

FILE = MODELS / "preforked.py"
SIGNATURE: Config = {"input": [tensor("DO", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}
SEEN = "MARKS, AT_IMPORT, AT_INITIALIZE, WEIGHTS"
FORGIVING = {"RESTART_WINDOW_S": 0.001}
BOTH = pytest.mark.parametrize("prefork", ["imports", "initialize"])
LEVELS = pytest.mark.parametrize("level", ["standard", "strict"])

# The files that the model writes.
MARKS = ("imports", "completions", "initializes", "finalizes")

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def completes() -> bool:
    return True


@pytest.fixture(autouse=True)
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    open_to_all(*(folder / name for name in MARKS))
    monkeypatch.setenv("MARKS", str(folder))
    # numpy's threads must end before a fork.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    return folder


def config(prefork: str, level: str = "standard", /, **more: object) -> Config:
    paths = f"rw:{os.environ['MARKS']}"
    known = {"PREFORK": prefork, "ENVIRONMENT": SEEN, "SANDBOX": level, "SANDBOX_PATHS": paths}
    return SIGNATURE | options(**known, **more)


def ask(runtime: moonpool.Runtime, do: str = "") -> Any:
    return json.loads(runtime.infer("m", {"DO": [do]}, timeout_s=60.0)["SAID"][0])


def count(marks: Path, what: str) -> int:
    return len((marks / what).read_text().splitlines())


def found(runtime: moonpool.Runtime) -> list[int]:
    """Return the pids of the instances that have a process."""
    return [int(each["pid"]) for each in runtime.instances("m") if each["pid"]]


def pids(runtime: moonpool.Runtime) -> list[int]:
    """Return the pids of all instances."""
    wait_until(lambda: len(found(runtime)) == len(runtime.instances("m")), 60.0)
    return found(runtime)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def inside(pid: int) -> int:
    """Return the number that a process has for itself: at `strict`, templates and their forks have their own."""
    (line,) = status(pid, "NSpid")
    return int(line.split()[-1])


def template(runtime: moonpool.Runtime) -> int:
    """Return the one process from which all instances were forked."""
    (pid,) = {parent(pid) for pid in pids(runtime)}
    assert parent(pid) == os.getpid()
    return pid


def regions(pid: int) -> set[str]:
    """Return the shared memory of a process, by inode."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {line.split()[4] for line in maps.splitlines() if "/memfd:" in line}


def private_bytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(size) << 10 for size in re.findall(r"Private_\w+: +(\d+) kB", rollup))


def are_ready(runtime: moonpool.Runtime, but: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Wait until every instance is ready, in other processes than these."""
    wait_until(
        lambda: (
            all(each["state"] == "READY" and each["pid"] for each in runtime.instances("m"))
            and not but & set(found(runtime))
        ),
        60.0,
        "other processes",
    )


# Done once


@pytest.mark.promise(
    "Forked instances",
    "With `MOONPOOL_PREFORK` instances are forked from a process that has imported the model "
    "once; with `initialize` also initialized it once, and weights are in memory once. Each has "
    "its own process and its own shared memory.",
)
@LEVELS
def test_instances_are_forked_from_a_process_that_has_imported_the_model_once(
    runtime: moonpool.Runtime, marks: Path, level: str
) -> None:
    with hosted(runtime, "m", FILE, config("imports", level), instances=3):
        assert count(marks, "imports") == count(marks, "completions") == 1
        assert count(marks, "initializes") == 3
        assert ask(runtime)["imported_by"] == inside(template(runtime))
        assert len(set(pids(runtime))) == 3

    assert count(marks, "finalizes") == 3


@pytest.mark.promise("Forked instances", "With `MOONPOOL_PREFORK` instances are forked from …")
@LEVELS
def test_initialize_is_called_once_where_the_model_asks_for_that(
    runtime: moonpool.Runtime, marks: Path, level: str
) -> None:
    with hosted(runtime, "m", FILE, config("initialize", level), instances=3):
        assert count(marks, "initializes") == 1
        # The process that completes the configuration imports the file once more.
        assert count(marks, "imports") == 2
        said = ask(runtime)
        assert said["imported_by"] == inside(template(runtime))
        # All forks have the arguments of the first instance.
        assert said["instance"] == "m_0_0"

    assert count(marks, "finalizes") == 3


@pytest.mark.promise("Forked instances", "With `MOONPOOL_PREFORK` instances are forked from …")
@BOTH
def test_every_instance_has_regions_of_its_own(runtime: moonpool.Runtime, prefork: str) -> None:
    with hosted(runtime, "m", FILE, config(prefork), instances=3):
        seen = [regions(pid) for pid in pids(runtime)]
        assert all(seen)
        assert len(set.union(*seen)) == sum(map(len, seen))
        # The template has no regions.
        assert regions(template(runtime)) == set()


@pytest.mark.promise("Forked instances", "With `MOONPOOL_PREFORK` instances are forked from …")
def test_weights_are_in_memory_once(runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = 64 << 20
    monkeypatch.setenv("WEIGHTS", str(size_bytes))

    with hosted(runtime, "m", FILE, config("initialize"), instances=2):
        assert ask(runtime)["weights"] == size_bytes
        assert all(private_bytes(pid) < size_bytes // 2 for pid in pids(runtime))


# Separate for each


@pytest.mark.promise(
    "Forked instances",
    "Forks draw different random numbers, keep the metrics that `initialize` made, log under "
    "their own names, and take with them what they forked.",
)
@BOTH
def test_instances_do_not_draw_the_same_numbers(runtime: moonpool.Runtime, prefork: str) -> None:
    drawn = []
    with hosted(runtime, "m", FILE, config(prefork, **FORGIVING)):
        for _ in range(3):
            drawn += ask(runtime, "draw")
            pid = pids(runtime)[0]
            os.kill(pid, signal.SIGKILL)
            are_ready(runtime, {pid})

    assert len(set(drawn)) == 6


@pytest.mark.promise("Forked instances", "Forks draw different random numbers, keep …")
@BOTH
def test_metrics_that_initialize_makes_are_those_of_every_instance(runtime: moonpool.Runtime, prefork: str) -> None:
    with hosted(runtime, "m", FILE, config(prefork), instances=2):
        for _ in range(6):
            ask(runtime, "count")
        assert 'preforked{instance="all"} 6' in runtime.metrics()
    assert "preforked" not in runtime.metrics()


@pytest.mark.promise("Forked instances", "Forks draw different random numbers, keep …")
@BOTH
def test_the_prints_of_an_instance_have_its_own_name(
    runtime: moonpool.Runtime, prefork: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with hosted(runtime, "m", FILE, config(prefork)):
        ask(runtime, "print")
        wait_until(lambda: "[m_0] printed" in caplog.text)
    by = "m_template" if prefork == "initialize" else "m_0"
    assert f"[{by}] initialized m_0" in caplog.text


@pytest.mark.promise("Forked instances", "Forks draw different random numbers, keep …")
def test_the_children_of_an_instance_end_with_it(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "m", FILE, config("imports")):
        child = ask(runtime, "fork")
        assert is_running(child)
    wait_until(lambda: not is_running(child))


# Strict


def status(pid: int, *names: str) -> list[str]:
    text = Path(f"/proc/{pid}/status").read_text()
    return [" ".join(re.findall(rf"^{name}:\s*(.*)$", text, re.MULTILINE)[0].split()) for name in names]


@pytest.mark.promise(
    "Forked instances", "At `strict` a fork has all layers of its template, one filter more, and may not fork."
)
def test_at_strict_a_fork_is_as_confined_as_its_template_and_may_not_fork(runtime: moonpool.Runtime) -> None:
    seen = ("Uid", "Gid", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
    with hosted(runtime, "m", FILE, config("imports", "strict"), instances=2):
        of_template = status(template(runtime), *seen)
        assert of_template[-2:] == ["1", "2"]
        assert [status(pid, *seen) for pid in pids(runtime)] == [of_template] * 2
        shown: Any = runtime.instances("m")[0]["sandbox"]
        assert {"limits", "no_new_privs", "seccomp"} <= set(shown["layers"])
        assert "share a template with its other instances" in shown["granted"]
        with pytest.raises(ModelError, match="not permitted"):
            ask(runtime, "fork")
        # Each fork has one filter more than the template, which may fork.
        (filters,) = status(template(runtime), "Seccomp_filters")
        more = [status(pid, "Seccomp_filters") for pid in pids(runtime)]
        assert more == [[str(int(filters) + 1)]] * 2


# Other kinds of model


@pytest.mark.promise(
    "Forked instances", "Models that ask others, decoupled ones and moonpool's own kind are forked as well."
)
def test_a_forked_model_asks_others(runtime: moonpool.Runtime) -> None:
    caller: Config = {
        "input": [tensor("DO", "STRING", 1), tensor("X", "FP32", -1)],
        "output": [tensor("Y", "FP32", -1), tensor("SAID", "STRING", 1)],
    }
    square: Config = {"input": [tensor("X", "FP32", -1)], "output": [tensor("Y", "FP32", -1)]}
    x = np.arange(4, dtype=np.float32)
    with (
        hosted(runtime, "square", MODELS / "square.py", square | options(PREFORK="initialize")),
        hosted(runtime, "m", MODELS / "caller.py", caller | options(PREFORK="initialize"), 2),
    ):
        assert template(runtime)
        for _ in range(4):
            answer = runtime.infer("m", {"DO": ["once"], "X": x}, timeout_s=60.0)
            assert answer["Y"].tolist() == [0, 1, 4, 9]


@pytest.mark.promise("Forked instances", "Models that ask others, decoupled ones …")
@BOTH
def test_a_forked_model_answers_in_its_own_time(runtime: moonpool.Runtime, prefork: str) -> None:
    responder: Config = {
        "input": [tensor("HOW", "STRING", 1), tensor("N", "INT32", 1)],
        "output": [tensor("Y", "INT32", -1)],
        "model_transaction_policy": {"decoupled": True},
    }
    with hosted(runtime, "m", MODELS / "responder.py", responder | options(PREFORK=prefork)):
        assert template(runtime)
        for how in ("count", "in_thread"):
            inputs = {"HOW": [how], "N": np.array([100], np.int32)}
            responses = runtime.stream("m", inputs, timeout_s=60.0)
            assert [int(each.outputs["Y"][0]) for each in responses] == list(range(100))


@pytest.mark.promise("Forked instances", "Models that ask others, decoupled ones …")
def test_moonpool_s_own_kind_of_model_is_forked(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    file = tmp_path / "native.py"
    file.write_text(NATIVE)
    with hosted(runtime, "m", file, options(PREFORK="initialize"), instances=2):
        (made_by, pid) = runtime.infer("m", {"X": np.zeros(1, np.int64)})["OUTPUT0"].tolist()
        assert made_by == inside(template(runtime))
        assert pid in pids(runtime)


NATIVE = """
import os
import numpy as np
from moonpool import Int64


class Model:
    def __init__(self):
        self.made_by = os.getpid()

    def __call__(self, X: Int64[1]) -> Int64[2]:
        return np.array([self.made_by, os.getpid()])
"""


# Deaths


@pytest.mark.promise(
    "Forked instances",
    "An instance that dies is forked again, and the log says how it died. When the template "
    "is killed, all instances come back from another one. Under load every request has one "
    "outcome.",
)
@pytest.mark.parametrize(("do", "words"), [("exit 7", "exited with 7"), ("die", "was killed by SIGSEGV")])
def test_how_an_instance_died_is_said_and_another_is_forked(
    runtime: moonpool.Runtime, marks: Path, do: str, words: str
) -> None:
    with hosted(runtime, "m", FILE, config("imports", **FORGIVING)):
        before, first = template(runtime), pids(runtime)
        with pytest.raises(StubDied, match=words):
            ask(runtime, do)
        are_ready(runtime, set(first))
        assert template(runtime) == before
        assert ask(runtime)["pid"] == inside(pids(runtime)[0])
        assert count(marks, "imports") == 1


@pytest.mark.promise("Forked instances", "An instance that dies is …")
@LEVELS
@BOTH
def test_when_the_template_is_killed_all_come_back_from_another_one(
    runtime: moonpool.Runtime, marks: Path, prefork: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    with hosted(runtime, "m", FILE, config(prefork, level), instances=3):
        before, first, imports = template(runtime), pids(runtime), count(marks, "imports")
        os.kill(before, signal.SIGKILL)
        are_ready(runtime, set(first))
        assert template(runtime) != before
        assert count(marks, "imports") == imports + 1
        assert ask(runtime)["weights"] == 1
    assert "the template of model 'm' has ended" in caplog.text


@pytest.mark.promise("Forked instances", "An instance that dies is …")
@pytest.mark.parametrize(
    ("prefork", "level"), [("imports", "standard"), ("initialize", "standard"), ("initialize", "strict")]
)
def test_every_request_has_one_outcome_while_instances_and_template_are_killed(
    runtime: moonpool.Runtime, prefork: str, level: str
) -> None:
    outcomes: list[str] = []
    done = threading.Event()

    def press() -> None:
        while not done.is_set():
            try:
                outcomes.append(str(ask(runtime)["weights"]))
            except (StubDied, ModelUnavailable):
                outcomes.append("lost")

    more = {"MAX_RESTARTS": 1000, "RESTART_BACKOFF_S": 0, "RETRY": "yes"}
    with hosted(runtime, "m", FILE, config(prefork, level, **more), instances=3):
        callers = [threading.Thread(target=press) for _ in range(3)]
        for caller in callers:
            caller.start()
        try:
            for turn in range(6):
                victims = pids(runtime)
                target = victims[turn % 3] if turn % 2 else template(runtime)
                seen = len(outcomes)
                os.kill(target, signal.SIGKILL)
                are_ready(runtime, {victims[turn % 3]} if turn % 2 else set(victims))
                wait_until(lambda seen=seen: len(outcomes) > seen, 60.0)  # type: ignore[misc]
        finally:
            done.set()
            for caller in callers:
                caller.join()
        assert ask(runtime)["imported_by"] == inside(template(runtime))
    assert set(outcomes) <= {"1", "lost"}
    assert "1" in outcomes


@pytest.mark.promise(
    "Forked instances",
    "If a template does not come back, or its model has threads, instances are started "
    "without it, with one warning that says why.",
)
def test_instances_start_without_a_template_that_does_not_come_back(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"MAX_RESTARTS": 2, "RESTART_BACKOFF_S": 0.01}
    with hosted(runtime, "m", FILE, config("imports", **limits), instances=2):
        first = pids(runtime)
        monkeypatch.setenv("AT_IMPORT", "exit in a template")
        os.kill(template(runtime), signal.SIGKILL)
        are_ready(runtime, set(first))
        assert {parent(pid) for pid in pids(runtime)} == {os.getpid()}
        given_up = "it died 3 times within 60 s, in which 2 restarts are allowed"
        wait_until(lambda: given_up in caplog.text, 60.0)


@pytest.mark.promise("Forked instances", "Unload ends the template, also one that hangs; a reload has another one.")
def test_unload_leaves_no_process(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "m", FILE, config("imports"), instances=2):
        all_pids = [template(runtime), *pids(runtime)]
    assert [pid for pid in all_pids if is_running(pid)] == []


@pytest.mark.promise("Forked instances", "Unload ends the template, also one …")
def test_a_reload_has_a_template_of_its_own(runtime: moonpool.Runtime, marks: Path) -> None:
    with hosted(runtime, "m", FILE, config("imports")):
        before = template(runtime)
        runtime.load("m", FILE, config=config("imports", THREADS=1))
        assert template(runtime) != before
        assert count(marks, "imports") == 2
        wait_until(lambda: not is_running(before))


# Models that do not fit


@pytest.mark.promise("Forked instances", "If a template does not …")
def test_a_model_with_threads_is_started_without_a_template(
    runtime: moonpool.Runtime, marks: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AT_IMPORT", "thread")
    with hosted(runtime, "m", FILE, config("imports"), instances=2):
        assert {parent(pid) for pid in pids(runtime)} == {os.getpid()}
        assert ask(runtime)["pid"] in pids(runtime)
        # The template, the completion and two instances import the file.
        assert count(marks, "imports") == 4
    assert caplog.text.count("it has 2 threads") == 1
    assert "instances are started without it" in caplog.text


@pytest.mark.promise(
    "Forked instances",
    "An error of the model in its template fails the load as it does elsewhere. Calls to the "
    "runtime are refused there, and the error says what to do.",
)
@pytest.mark.parametrize(
    ("way", "words"), [("exit", "exited with 3"), ("raise", "ValueError: on purpose"), ("hang", "not ready in time")]
)
@pytest.mark.parametrize(("place", "prefork"), [("AT_IMPORT", "imports"), ("AT_INITIALIZE", "initialize")])
def test_a_template_that_cannot_be_made_fails_the_load_in_the_models_words(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, place: str, prefork: str, way: str, words: str
) -> None:
    monkeypatch.setenv(place, way)
    limit = {"LOAD_TIMEOUT_S": 2} if way == "hang" else {}
    with pytest.raises(LoadFailed, match=words):
        runtime.load("m", FILE, config=config(prefork, **limit))


@pytest.mark.promise("Forked instances", "An error of the model …")
def test_a_model_that_asks_the_runtime_in_its_template_is_told_what_to_do(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AT_INITIALIZE", "load a model")
    with pytest.raises(LoadFailed, match="set MOONPOOL_PREFORK to imports, or to no"):
        runtime.load("m", FILE, config=config("initialize"))


@pytest.mark.promise("Forked instances", "Unload ends the template, also one …")
def test_an_unload_does_not_wait_for_a_template_that_hangs(
    runtime: moonpool.Runtime, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosted(runtime, "m", FILE, config("imports")):
        monkeypatch.setenv("AT_IMPORT", "hang")
        os.kill(template(runtime), signal.SIGKILL)
        wait_until(lambda: count(marks, "imports") == 2, 60.0)
        unloading = Deadline(30.0)
    # The unload takes far less than the two minutes that the hanging import may take.
    assert not unloading.is_over
