"""`moonpool tune`: the best settings, as a diff, a page and a changed file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from tests.runtime.cli.shell import MODELS, PATIENCE_S, CommandLine, write_model

from moonpool.benchmarks.commands.tune_report import replace_file
from moonpool.benchmarks.tuning.search import Place
from moonpool.benchmarks.tuning.tuner import Measured, Tuner
from moonpool.runtime.cli.main import main

TENSORS = """\
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
# It waits, so that its rate follows from the number of instances on every machine. A third instance fails.
WAITS = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        if args["model_instance_name"].endswith("_2"):
            raise RuntimeError("no room for a third one")

    def execute(self, requests):
        time.sleep(0.03)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
            for r in requests
        ]
"""
ASKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            asked = pb_utils.InferenceRequest(
                model_name="child", requested_output_names=["Y"], inputs=request.inputs()
            ).exec()
            if asked.has_error():
                raise pb_utils.TritonModelException(asked.error().message())
            answers.append(pb_utils.InferenceResponse(asked.output_tensors()))
        return answers
"""
ENSEMBLE = f"""\
platform: "ensemble"
{TENSORS}ensemble_scheduling {{ step [ {{ model_name: "asks" model_version: -1
  input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "Y" }} }} ] }}
"""
CONFIG = f"""\
backend: "python"
# What it takes.
{TENSORS}# One is enough for a test.
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""
QUICK = (
    "--seconds", "0.1", "--warm-up", "0.05", "--windows", "3", "--stable", "10000", "--most-callers", "4",
)  # fmt: skip


@pytest.fixture
def waits(cli: CommandLine) -> Path:
    """A repository with a model whose rate is known, in which two instances are the most that work."""
    write_model(cli.folder / "models", "waits", WAITS, CONFIG)
    return cli.folder / "models"


@pytest.mark.promise(
    "Finding settings (`moonpool tune`)",
    "The best settings are those that were measured to be best within the limits; `--write` changes their lines of "
    "`config.pbtxt` and nothing else, and without it no file changes.",
)
@pytest.mark.promise(
    "Finding settings (`moonpool tune`)",
    "Settings with which the model does not load are marked, and the search goes on.",
)
def test_a_model_that_waits_gets_another_instance(cli: CommandLine, waits: Path) -> None:
    ended = cli(
        "tune", waits, "waits", "--slo", "p99=20s", "--settings", "instances,max_batch",
        "--most-instances", "3", "--html", "page.html", "--write", *QUICK, "--seconds", "0.5",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    assert "waits.instances  1    1, 2, 3" in ended.stdout
    assert "left out: waits.max_batch: it takes no batches" in ended.stdout
    assert "fails" in ended.stderr
    assert "no room for a third one" in ended.stderr
    assert "Settings that were tried and do not work: 1." in ended.stdout
    assert re.search(r"Best within p99 20 s: .* with waits\.instances=2\.", ended.stdout)
    assert re.search(r"Measured again in turns .*: [\d.]+ and [\d.]+ times the rate", ended.stdout)
    assert "-instance_group [ { count: 1 kind: KIND_CPU } ]" in ended.stdout
    assert "+instance_group [ { count: 2 kind: KIND_CPU } ]" in ended.stdout
    changed = CONFIG.replace("count: 1", "count: 2")
    assert (waits / "waits" / "config.pbtxt").read_text() == changed
    assert {path.name for path in (waits / "waits").iterdir()} == {"1", "config.pbtxt"}
    page = (cli.folder / "page.html").read_text()
    assert "<script" not in page
    assert "+instance_group [ { count: 2" in page
    assert page.count("<svg") == 1


@pytest.mark.promise("Finding settings (`moonpool tune`)", "Settings are compared at the same number of callers, …")
def test_what_is_not_better_when_it_is_measured_again_is_not_written(
    waits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def again(tuner: Tuner, place: Place, callers: int) -> Measured:
        rate = 50.0 if place == tuner.start else 40.0
        return Measured(place, callers, rate, rate, 1000.0)

    monkeypatch.setattr(Tuner, "_measure_again", again)
    words = [
        "tune", str(waits), "waits", "--settings", "instances", "--most-instances", "2", "--write", *QUICK,
        "--most-callers", "2", "--seconds", "0.5",
    ]  # fmt: skip

    assert main(words) == 0

    shown = capsys.readouterr().out
    assert "with waits.instances=2." in shown
    assert "0.80 and 0.80 times the rate" in shown
    assert "so nothing is proposed" in shown
    assert "instance_group" not in shown
    assert (waits / "waits" / "config.pbtxt").read_text() == CONFIG


@pytest.mark.promise(
    "Finding settings (`moonpool tune`)",
    "If no settings hold within the limits, the best that was seen is shown, nothing is written, and the command "
    "fails.",
)
def test_limits_that_cannot_be_met_are_told_with_the_best(cli: CommandLine) -> None:
    ended = cli(
        "tune", MODELS, "add_sub", "--slo", "p99=1us", "--settings", "instances", "--most-instances", "2",
        "--budget", "2", "--load-model", "add_sub", "--write", *QUICK,
    )  # fmt: skip

    assert ended.returncode == 1
    assert "No settings were found that hold within p99 1 µs. The best that was seen:" in ended.stdout
    assert re.search(r"^moonpool: add_sub\.instances=2, \d callers?: ", ended.stderr, re.MULTILINE)


@pytest.mark.promise(
    "Finding settings (`moonpool tune`)",
    "The settings of all models that a request reaches are tried, whether an ensemble or a model asks them.",
)
def test_models_that_are_asked_are_tuned_too(cli: CommandLine, waits: Path) -> None:
    write_model(waits, "asks", ASKS, CONFIG)
    write_model(waits, "child", WAITS, CONFIG)
    (waits / "pipeline" / "1").mkdir(parents=True)
    (waits / "pipeline" / "config.pbtxt").write_text(ENSEMBLE)

    ended = cli(
        "tune", waits, "pipeline", "--settings", "instances,delay", "--most-instances", "2",
        "--budget", "2", *QUICK,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    tried = re.findall(r"^(\w+)\.instances +1 +1, 2$", ended.stdout, re.MULTILINE)
    assert tried == ["asks", "child"]
    assert "left out: pipeline.instances: an ensemble has no instances" in ended.stdout
    assert "waits.instances" not in ended.stdout
    for model in ("asks", "child"):
        assert (waits / model / "config.pbtxt").read_text() == CONFIG


def test_an_interrupt_shows_what_was_found(cli: CommandLine, waits: Path) -> None:
    words = ("tune", waits, "waits", "--settings", "instances", "--most-instances", "2")
    process = cli.start(*words, *QUICK, "--seconds", "1", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stderr is not None
        # The first load is measured; others follow.
        while line := process.stderr.readline():
            if b"as now, 1 caller:" in line:
                break
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)

    assert b"as now" in stdout, stderr
    assert b"requests/s" in stdout
    assert process.returncode == 130


def test_an_interrupt_before_the_first_load_says_no_more(cli: CommandLine, waits: Path) -> None:
    words = ("tune", waits, "waits", "--settings", "instances", "--most-instances", "2")
    process = cli.start(*words, *QUICK, "--seconds", "60", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        # What is searched is printed when the models are loaded.
        while line := process.stdout.readline():
            if b"load average" in line:
                break
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)

    assert b"interrupted" in stderr
    assert b"was measured" not in stderr
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (("nothing",), "no model 'nothing'", 1),
        (("add_sub", "--slo", "p99"), "--slo: 'p99' must be FIGURE=TIME", 2),
        (("add_sub", "--budget", "long"), "--budget: 'long' is not a time", 2),
        (("add_sub", "--settings", "speed"), "--settings: 'speed' is none of instances", 2),
        (("add_sub", "--most-instances", "0"), "--most-instances must be more than 0", 2),
        (("add_sub", "--seconds", "0"), "--seconds must be more than 0", 2),
    ],
)
def test_what_is_wrong_is_told(cli: CommandLine, arguments: tuple[str, ...], text: str, code: int) -> None:
    ended = cli("tune", MODELS, *arguments)

    assert ended.returncode == code
    assert text in ended.stderr


def test_a_model_that_does_not_load_is_told_with_the_reason(cli: CommandLine) -> None:
    write_model(cli.folder / "models", "broken", "raise RuntimeError('not today')", CONFIG)

    ended = cli("tune", "models", "broken", *QUICK)

    assert ended.returncode == 1
    assert "model 'broken' is not ready: " in ended.stderr
    assert "not today" in ended.stderr


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_in_the_place_of_the_temporary_one_is_kept(tmp_path: Path, *, is_link: bool) -> None:
    config, precious = tmp_path / "config.pbtxt", tmp_path / "precious"
    config.write_text("old")
    precious.write_text("keep")
    temporary = tmp_path / f".config.pbtxt.{os.getpid()}"
    temporary.symlink_to(precious) if is_link else temporary.write_text("keep")

    with pytest.raises(FileExistsError):
        replace_file(config, "new")

    assert config.read_text() == "old"
    assert temporary.read_text() == precious.read_text() == "keep"


def test_a_file_is_replaced_with_the_mode_of_the_one_before(tmp_path: Path) -> None:
    config = tmp_path / "config.pbtxt"
    config.write_text("old")
    config.chmod(0o640)

    replace_file(config, "new")

    assert config.read_text() == "new"
    assert config.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [config]
