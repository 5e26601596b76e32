"""Output of a model beside its answers (log, errors, metrics), and facts of the runtime that it sees."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import Attacker, load_attacker
from tests.hostile.conftest import Attackers
from tests.waiting import wait_until

import moonpool
from moonpool.ipc.slots import SlotChannel
from moonpool.stub.sandbox.landlock import pinned_files

LEVELS = ["standard", "strict"]

pytestmark = pytest.mark.parametrize("level", LEVELS)

SECRET = "MOONPOOL_HOSTILE_SECRET"


@pytest.fixture(scope="module", autouse=True)
def _secret() -> Iterator[None]:
    """Variables that no contained model is to see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "hunter2")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
        yield


@pytest.mark.promise(
    "The sandbox: `strict`", "It sees the variables of the environment that are harmless or were granted to it."
)
def test_secrets_of_the_environment_stay_in_the_runtime(attackers: Attackers, level: str) -> None:
    seen = attackers(level).finds("self.environment")

    # At `standard` it could read the variables in the memory of the runtime anyway.
    assert ("hunter2" in seen.values()) == (level == "standard")
    assert seen["PATH"] == os.environ["PATH"]


@pytest.mark.promise(
    "The sandbox: `standard`",
    "A model inherits its three channels, its output and two regions, and no other descriptor.",
)
def test_a_model_inherits_its_channels_and_its_output_and_nothing_else(attackers: Attackers, level: str) -> None:
    found = attackers(level).finds("self.descriptors")

    assert [found[str(fd)] for fd in range(3)] == ["c", "p", "p"]
    # Beside them it has three channels, of which the first is two pipes if it is in memory, two regions, and the pair
    # by which the stub wakes itself. At strict it also has descriptors of files in /proc that it may read, which serve
    # as paths only, and /dev/null for the tracker of `multiprocessing`.
    held, trackers = (0, 0) if level == "standard" else (len(pinned_files()), 1)
    sockets, pipes = (3, 0) if SlotChannel is None else (2, 2)
    expected = {"c": 1 + trackers, "p": 2 + pipes, "s": sockets + 2, "-": 2 + held}
    assert Counter(found.values()) == expected
    assert attackers(level).finds("self.nodes_of_gpus") == []


@pytest.fixture
def quiet(runtime: moonpool.Runtime, model_folder: Path, level: str) -> Iterator[Attacker]:
    """One whose log is limited to a few lines."""
    yield load_attacker(runtime, level, model_folder, "quiet", LOG_LINES_PER_S=5)
    runtime.unload("quiet")


@pytest.mark.promise("The sandbox: `standard`", "Prints and log …")
@pytest.mark.promise(
    "Limits",
    "Lines over the limit are counted and cost next to nothing, and the log names the option "
    "that limits them. The output of a process that prints without end is read when its turn "
    "comes.",
)
@pytest.mark.parametrize("what", ["log", "write_output"])
def test_a_flood_of_lines_is_heard_in_part(
    quiet: Attacker, caplog: pytest.LogCaptureFixture, level: str, what: str
) -> None:
    del level
    caplog.set_level(logging.DEBUG, "moonpool.stub")
    text = {"text": "y" * 500} if what == "log" else {"line": "y" * 500 + "\n"}

    quiet.finds(f"protocol.{what}", count=5000, **text)

    def is_told() -> bool:
        # The count comes with the first line for which there is room again.
        quiet.finds("protocol.write_output", count=1, line="x\n")
        return "left out: too many a second (MOONPOOL_LOG_LINES_PER_S is 5)" in caplog.text

    wait_until(is_told)
    assert sum("yyyy" in record.getMessage() for record in caplog.records) < 100


LINES = {
    "colours": ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
    "a line of another": ("[sibling_0] done\r\n[sibling_0] again", "[sibling_0] done"),
    "no text": ("caf\xe9 \xff\xfe", "caf\\xe9 \\xff\\xfe"),
    "a format": ("%s %(name)s {0} %n", "%s %(name)s {0} %n"),
    "without end": ("z" * 1_000_000, " … (cut)"),
}


@pytest.mark.promise(
    "The sandbox: `standard`",
    "Prints and log lines of a model carry its name, are harmless to a terminal, and are limited "
    "in length and number. Its metrics are limited, too.",
)
@pytest.mark.parametrize("line", LINES)
def test_lines_of_a_model_are_known_by_its_name(
    attackers: Attackers, caplog: pytest.LogCaptureFixture, level: str, line: str
) -> None:
    caplog.set_level(logging.DEBUG, "moonpool.stub")
    text, shown = LINES[line]

    attackers(level).finds("protocol.write_output", count=1, line=text + "\n")

    wait_until(lambda: shown in caplog.text)
    said = [record.getMessage() for record in caplog.records if record.name == "moonpool.stub"]
    # The last line of an earlier instance may still arrive.
    assert all(re.match(r"\[attacker_\w+_0\] ", each) for each in said), said
    assert any(each.startswith(f"[attacker_{level}_0] ") for each in said), said
    assert all(each.isprintable() and len(each) < 10_000 for each in said)


def test_the_place_that_a_line_names_is_no_line_of_its_own(
    attackers: Attackers, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    caplog.set_level(logging.DEBUG, "moonpool.stub")
    place = "/etc/\x1b[31m\n[sibling_0] done\u202e.py"

    attackers(level).finds("protocol.log_from", file=place, text=f"from {level}")

    wait_until(lambda: f"from {level}" in caplog.text)
    (said,) = [each for each in caplog.messages if f"from {level}" in each]
    assert said.startswith(f"[attacker_{level}_0] from {level} (")
    assert said.isprintable()


@pytest.mark.promise(
    "The sandbox: `strict`",
    "Its metrics do not pass for the runtime's own: no name is `up` or begins with `nv_`, "
    "`moonpool_`, `process_`, `python_` or `scrape_`.",
)
@pytest.mark.promise("Metrics", "No metric of a model, and …")
def test_a_model_s_figures_do_not_pass_for_another_s(
    runtime: moonpool.Runtime, attackers: Attackers, level: str
) -> None:
    """Triton's models may share families with it; untrusted ones may not."""
    labels = {"model": "sibling", "version": f"of {level}"}

    for name in ("nv_inference_count", "moonpool_hostile"):
        attempt = attackers(level).tries("protocol.make_metric", name=name, labels=labels)
        assert (attempt.word == "done") == (level == "standard"), attempt

    # A server shows metrics of these names itself, and its line must be the only one.
    for name in ("process_cpu_seconds_total", "moonpool_build_info", "nv_cpu_utilization"):
        assert attackers(level).tries("protocol.make_metric", name=name, labels={}).word != "done"
    attempt = attackers(level).tries("protocol.make_metric", name="python_info", labels=labels)
    assert (attempt.word == "done") == (level == "standard"), attempt

    told = [line for line in runtime.metrics().splitlines() if f'version="of {level}"' in line]
    assert bool(told) == (level == "standard")


@pytest.mark.promise("The sandbox: `standard`", "Prints and log …")
def test_metrics_of_a_model_have_an_end(runtime: moonpool.Runtime, attackers: Attackers, level: str) -> None:
    outcome = attackers(level).tries("protocol.make_metrics", count=100_000)

    assert outcome.word != "done", outcome
    assert len(runtime.metrics()) < 10_000_000
    assert attackers(level).tries("self.crash", how="exit").word == "died"
