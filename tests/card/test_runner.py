"""The runner of stages: whatever hangs, dies or leaves something behind, results stay whole and the next stage runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.card import results, stages
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
# Has the runner run stages of stand-ins: for each its name, and for each of its rounds the kinds of the steps.
PROGRAM = """
import json, sys
from pathlib import Path
from tests.card import stages
from tests.card.__main__ import Runner, end_on_request
from tests.card.stages import Stage, Step

folder, total_s, limit_s, table = sys.argv[1], *map(json.loads, sys.argv[2:])
stages.patience = lambda: 1.0
def step(stage, number, kind):
    limit = limit_s if kind == "hangs" else 60
    return Step(f"{stage} {number}", "tests.card.stand_in", (kind,), limit)
chosen = [
    Stage(name, tuple(tuple(step(name, *each) for each in enumerate(kinds)) for kinds in rounds))
    for name, rounds in table
]
end_on_request()
Runner(Path(folder), total_s).run(chosen)
"""
Table = list[tuple[str, list[list[str]]]]


@contextlib.contextmanager
def started(
    folder: Path, table: Table, limit_s: float = 0.5, total_s: float = 540
) -> Iterator[subprocess.Popen[bytes]]:
    """A runner with stand-ins for these stages. It is killed after the block, if it runs."""
    arguments = [str(folder), *map(json.dumps, (total_s, limit_s, table))]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(folder: Path, table: Table, **settings: float) -> list[Mapping[str, Any]]:
    """Run stand-ins for these stages, and return their results."""
    with started(folder, table, **settings) as process:
        assert process.wait(120) == 0
    return results.read(folder)


def steps(found: list[Mapping[str, Any]]) -> dict[str, tuple[bool | None, str]]:
    """Return how each step ended."""
    return {
        line["name"].removeprefix("step "): (line["ok"], line["text"])
        for line in found
        if line["name"].startswith("step ")
    }


def pids_in(found: list[Mapping[str, Any]]) -> list[int]:
    return [line["value"] for line in found if line["name"] == "process"]


def have_ended(pids: list[int]) -> None:
    """Wait until none of these processes is left."""
    wait_until(lambda: not any(map(_runs, pids)), what="the steps and their processes to be gone")


def killed(process: subprocess.Popen[bytes]) -> list[int]:
    """Kill a runner, and return the steps that it had begun."""
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: _state(process.pid) in "TZ", what="the runner to stop")
    # Those that have ended are among them.
    begun = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    return [*map(int, begun)]


def wait_for_results(folder: Path, number: int) -> None:
    """Wait until a runner has recorded so many results."""
    wait_until(lambda: len(results.read(folder)) >= number, what=f"{number} results")


def _runs(pid: int) -> bool:
    runs = _state(pid) not in "ZX"
    # This process is the parent of orphans if it is the first one of its namespace.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return runs


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def test_results_are_whole_if_the_runner_is_killed_at_any_moment(tmp_path: Path) -> None:
    table: Table = [("facts", [["quick"]]), ("tests", [["writes", "writes"]]), ("report", [["quick"]])]
    for kill_after in random.sample(range(205), 5):
        folder = tmp_path / str(kill_after)
        folder.mkdir()
        with started(folder, table) as process:
            wait_for_results(folder, kill_after)
            have_ended(killed(process))
        found = results.read(folder)
        run(folder, [("report", [["quick"]])])
        *lines, end = (folder / results.NAME).read_bytes().split(b"\n")

        assert end == b""
        assert [json.loads(line) for line in lines][: len(found)] == found, kill_after
        assert len(lines) == len(found) + 2, kill_after
        if any(line["stage"] == "tests" for line in found):
            assert steps(found)["facts 0"] == (True, ""), kill_after


def test_what_a_killed_writer_has_left_of_a_line_spoils_no_other(tmp_path: Path) -> None:
    def add(name: str) -> None:
        results.add(tmp_path, "facts", name, True, 1, "", "", "", 0.0)

    add("first")
    with (tmp_path / results.NAME).open("ab") as file:
        file.write(b'{"stage": "facts", "name": "sec')

    assert [line["name"] for line in results.read(tmp_path)] == ["first"]
    add("third")
    assert [line["name"] for line in results.read(tmp_path)] == ["first", "third"]


def test_results_have_a_bound_and_are_json_everywhere(tmp_path: Path) -> None:
    results.add(tmp_path, "s" * 10, "n" * 10_000, None, float("nan"), "", "e", "é" * 10_000, 0.0)
    text = (tmp_path / results.NAME).read_text()

    assert len(text) < 16_000
    assert json.loads(text, parse_constant=pytest.fail)["value"] == "nan"


def test_a_truth_of_numpy_s_that_is_false_is_a_failure(tmp_path: Path) -> None:
    results.add(tmp_path, "s", "n", np.bool_(False), None, "", "", "", 0.0)  # type: ignore[arg-type]

    assert results.read(tmp_path)[0]["ok"] is False


NAMES = [stage.name for stage in stages.STAGES]


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_stage_that_hangs_is_killed_and_the_next_one_runs(tmp_path: Path, name: str) -> None:
    (stage,) = [stage for stage in stages.STAGES if stage.name == name]
    # Of the steps that run side by side only the first one hangs.
    rounds = [["hangs", *["quick"] * (len(each) - 1)] for each in stage.rounds]
    after = NAMES[NAMES.index(name) + 1]
    found = run(tmp_path, [(name, rounds), (after, [["quick"]])])
    have_ended(pids_in(found))

    of_stage = [line for line in found if line["stage"] == name and line["name"].startswith("step ")]
    killed = [line for line in of_stage if "killed at its limit" in line["text"]]
    assert len(killed) == len(rounds)
    assert len(of_stage) == sum(map(len, rounds))
    assert all(line["ok"] for line in of_stage if line not in killed)
    assert steps(found)[f"{after} 0"] == (True, "")


def test_what_a_step_leaves_behind_is_killed_and_recorded(tmp_path: Path) -> None:
    found = run(tmp_path, [("soak", [["leaves"]]), ("report", [["quick"]])])
    have_ended(pids_in(found))

    (left,) = [line for line in found if line["name"] == "leaves no process behind"]
    assert left["stage"] == "soak"
    assert left["ok"] is False
    assert "-c import signal" in left["text"]
    assert steps(found)["report 0"] == (True, "")


def test_a_step_that_lacks_a_package_is_a_failure_that_says_so(tmp_path: Path) -> None:
    found = run(tmp_path, [("breadth", [["lacks"]]), ("report", [["quick"]])])
    ok, text = steps(found)["breadth 0"]

    assert ok is False
    assert "ended with 1" in text
    assert "ModuleNotFoundError: No module named 'package_that_no_machine_has'" in text


def test_stages_for_which_no_time_is_left_are_left_out_and_the_report_runs(tmp_path: Path) -> None:
    found = run(
        tmp_path, [("figures", [["hangs"]]), ("soak", [["quick"]]), ("report", [["quick"]])], total_s=61.0, limit_s=60.0
    )

    assert steps(found)["soak 0"] == (None, "left out: no time is left")
    assert steps(found)["report 0"] == (True, "")


def test_a_step_that_prints_without_end_fills_no_disk(tmp_path: Path) -> None:
    found = run(tmp_path, [("facts", [["prints"]])])

    assert steps(found)["facts 0"] == (True, "")
    assert (tmp_path / "log.txt").stat().st_size < 2 << 20
    assert "the rest is left out" in (tmp_path / "log.txt").read_text()


# What it prints is there before the runner has read what was there before.
ENDLESS = """
import subprocess, sys
from pathlib import Path
from tests.card.__main__ import Runner, _Running
from tests.card.stages import Step

process = subprocess.Popen(["true"])
process.stdout = open("/dev/zero", "rb", buffering=0)
Runner(Path(sys.argv[1]))._copy(_Running(Step("prints", ""), process, 0.0, 0.0), None)
"""


def test_a_step_that_prints_faster_than_the_runner_reads_does_not_keep_it(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", ENDLESS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        cwd=ROOT,
        check=True,
        timeout=60,
    )


def test_on_a_full_disk_all_stages_run_and_what_they_came_to_is_printed(tmp_path: Path) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))\n"
    table = [("facts", [["quick"]]), ("tests", [["quick"]]), ("report", [["quick"]])]
    ended = subprocess.run(
        [sys.executable, "-c", full + PROGRAM, str(tmp_path), "540", "60", json.dumps(table)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    assert steps(results.read(tmp_path))["facts 0"] == (True, "")
    assert "report: step report 0: " in ended.stdout
    assert "not written: " in ended.stdout


def test_a_runner_that_is_asked_to_end_kills_its_steps(tmp_path: Path) -> None:
    with started(tmp_path, [("facts", [["hangs"]])], limit_s=60) as process:
        wait_for_results(tmp_path, 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1

    have_ended(pids_in(results.read(tmp_path)))
