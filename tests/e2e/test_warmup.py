"""Tests of warm-up: what instances execute before they are ready, in real processes."""

from __future__ import annotations

import ast
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, hosted, open_to_all, tensor
from tests.inside import hosted_in, registry_of
from tests.waiting import wait_until

import moonpool
from moonpool import InvalidRequest, LoadFailed
from moonpool.ipc.tensors import check_bytes
from moonpool.runtime.model import signature

PATIENCE_S = 60.0
WARMED = MODELS / "warmed.py"


def given(datatype: str = "FP32", *dims: int, **how: object) -> dict[str, Any]:
    return {"data_type": f"TYPE_{datatype}", "dims": list(dims or (1,)), **(how or {"zero_data": True})}


def sample(name: str = "S", *, batch_size: int = 1, count: int = 0, **inputs: Any) -> dict[str, Any]:
    made = inputs or {"X": given()}
    return {"name": name, "batch_size": batch_size, "count": count, "inputs": made}


class Warmed:
    """Make configurations of the model, and read what it has written down."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        open_to_all(self.log)

    def config(self, *samples: dict[str, Any], does: str = "", **more: Any) -> dict[str, Any]:
        parameters = {"log": str(self.log), "does": does, **more.pop("parameters", {})}
        return {
            "max_batch_size": 4,
            "input": [tensor("X", "FP32", 1)],
            "output": [tensor("Y", "FP32", 1)],
            "model_warmup": list(samples),
            "parameters": parameters,
            **more,
        }

    @property
    def lines(self) -> list[str]:
        """Return what the instances did, without their names and processes."""
        return [line.split(" ", 2)[2] for line in self.log.read_text().splitlines()]

    @property
    def batches(self) -> list[Any]:
        return [ast.literal_eval(line.removeprefix("execute ")) for line in self.lines if line.startswith("execute")]


@pytest.fixture
def warmed(tmp_path: Path) -> Warmed:
    return Warmed(tmp_path)


ZERO = {"X": [[0.0]]}


@pytest.mark.promise(
    "Models",
    "Every instance executes the warm-up samples of its model before it is ready: `batch_size` requests of one row in "
    "one batch, `count` times, and none of them counts in the statistics.",
)
def test_every_instance_executes_the_samples_before_it_is_ready(runtime: moonpool.Runtime, warmed: Warmed) -> None:
    config = warmed.config(sample(batch_size=3, count=2), sample("T"), sample("U", batch_size=0))
    with hosted(runtime, "m", WARMED, config, instances=2):
        assert sorted(map(len, warmed.batches)) == [1, 1, 3, 3, 3, 3]
        assert warmed.batches[0] == [ZERO, ZERO, ZERO]
        by_instance = [line.split()[0] for line in warmed.log.read_text().splitlines()]
        assert by_instance.count("m_0_0") == by_instance.count("m_0_1") == 4
        counts = runtime.statistics("m")
        assert (counts["inference_count"], counts["execution_count"]) == (0, 0)


def test_a_warmed_model_serves(runtime: moonpool.Runtime, warmed: Warmed) -> None:
    with hosted(runtime, "m", WARMED, warmed.config(sample())):
        runtime.infer("m", {"X": np.ones((1, 1), np.float32)}, timeout_s=PATIENCE_S)

        assert warmed.batches == [[ZERO], [{"X": [[1.0]]}]]


def test_a_model_without_batches_is_warmed_up_with_several_requests(runtime: moonpool.Runtime, warmed: Warmed) -> None:
    with hosted(runtime, "m", WARMED, warmed.config(sample(batch_size=2), max_batch_size=0)):
        assert warmed.batches == [[{"X": [0.0]}] * 2]


@pytest.mark.promise("Models", "Every instance executes the warm-up …")
def test_an_instance_is_warmed_up_after_each_restart(runtime: moonpool.Runtime, warmed: Warmed) -> None:
    with hosted(runtime, "m", WARMED, warmed.config(sample())):
        (record,) = hosted_in(runtime, "m").supervisor.records
        pid = int(warmed.log.read_text().split()[1])
        os.kill(pid, 9)
        wait_until(lambda: record.restarts == 1, PATIENCE_S)

        assert warmed.lines == ["initialize", f"execute {[ZERO]!r}"] * 2


@pytest.mark.parametrize("prefork", ["imports", "initialize"])
def test_an_instance_that_is_forked_is_warmed_up(runtime: moonpool.Runtime, warmed: Warmed, prefork: str) -> None:
    config = warmed.config(sample(), parameters={"MOONPOOL_PREFORK": prefork})
    with hosted(runtime, "m", WARMED, config, instances=2):
        assert warmed.batches == [[ZERO], [ZERO]]


@pytest.mark.promise(
    "Models", "The load of a model fails if it answers a warm-up request with an error, and the error names the sample."
)
@pytest.mark.parametrize("more", [{}, {"model_transaction_policy": {"decoupled": True}}])
@pytest.mark.parametrize(
    ("does", "text"),
    [
        (
            "raise",
            "failed to run warmup sample 'S': Failed to process the request(s) for model 'm_0', message: ValueError: "
            "on purpose",
        ),
        ("refuse", "failed to run warmup sample 'S': no 0; no 1; "),
        ("die", "failed to run warmup sample 'S': Stub process 'm_0' is not healthy. It exited with 7 during execute"),
    ],
)
def test_a_failure_fails_the_load_and_names_the_sample(
    runtime: moonpool.Runtime, warmed: Warmed, does: str, text: str, more: dict[str, Any]
) -> None:
    if more and does == "refuse":
        pytest.skip("a decoupled model returns nothing")
    with pytest.raises(LoadFailed) as caught:
        runtime.load("m", WARMED, config=warmed.config(sample(batch_size=2), does=does, **more))

    assert str(caught.value).startswith(text)
    assert caught.value.code == "INVALID_ARG"


@pytest.mark.parametrize(
    ("does", "text"),
    [("refuse later", "failed to run warmup sample 'S': late; "), ("die later", "failed to run warmup sample 'S': ")],
)
def test_a_decoupled_model_is_warm_when_it_has_sent_its_last_response(
    runtime: moonpool.Runtime, warmed: Warmed, does: str, text: str
) -> None:
    more: dict[str, Any] = {"model_transaction_policy": {"decoupled": True}}
    with hosted(runtime, "m", WARMED, warmed.config(sample(batch_size=2), **more)):
        assert warmed.lines.count("sent") == 2

    with pytest.raises(LoadFailed) as caught:
        runtime.load("m", WARMED, config=warmed.config(sample(), does=does, **more))
    assert str(caught.value).startswith(text)


def test_a_warmup_takes_no_longer_than_a_load_may(runtime: moonpool.Runtime, warmed: Warmed) -> None:
    config = warmed.config(
        sample(), does="hang", parameters={"MOONPOOL_LOAD_TIMEOUT_S": "5", "MOONPOOL_FINALIZE_TIMEOUT_S": "1"}
    )
    with pytest.raises(LoadFailed, match="took longer than 5 s to start and to warm up"):
        runtime.load("m", WARMED, config=config)


@pytest.mark.parametrize(("inputs", "text"), [({"Z": given()}, "unexpected inference input 'Z' for model 'm'")])
def test_data_that_does_not_fit_is_refused(
    runtime: moonpool.Runtime, warmed: Warmed, tmp_path: Path, inputs: dict[str, Any], text: str
) -> None:
    folder = write(tmp_path / "repository" / "m", short=b"abc")
    with pytest.raises(InvalidRequest) as caught:
        runtime.load("m", folder, config=warmed.config(sample(**inputs)))

    assert str(caught.value).startswith(text)
    assert warmed.lines == []


def test_a_batch_larger_than_the_model_takes_is_refused(runtime: moonpool.Runtime, warmed: Warmed) -> None:
    with pytest.raises(LoadFailed, match=r"'S': (batch size 5 for 'm_0', max allowed is 4; ){5}"):
        runtime.load("m", WARMED, config=warmed.config(sample(batch_size=5)))


def write(folder: Path, **files: bytes) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "warmup").mkdir()
    (folder / "1" / "model.py").write_text(WARMED.read_text())
    for name, content in files.items():
        (folder / "warmup" / name).write_bytes(content)
    return folder


def test_data_may_come_from_files_and_be_random(runtime: moonpool.Runtime, warmed: Warmed, tmp_path: Path) -> None:
    folder = write(tmp_path / "repository" / "m", f=np.array([7, 8], np.float32).tobytes(), s=b"\1\0\0\0a")
    config = warmed.config(
        sample(
            X=given(input_data_file="f"), T=given("STRING", input_data_file="s"), I=given("INT32", random_data=True)
        ),
        sample(X=given(random_data=True), T=given("STRING", random_data=True), I=given("INT32")),
        input=[tensor("X", "FP32", 1), tensor("T", "STRING", 1), tensor("I", "INT32", 1)],
    )
    with hosted(runtime, "m", folder, config):
        ((first,), (second,)) = warmed.batches
    assert (first["X"], first["T"]) == ([[7.0]], [[b"a"]])
    assert (second["T"], second["I"]) == ([[b""]], [[0]])
    assert 0 <= second["X"][0][0] < 1
    assert first["I"] != [[0]]


def test_the_strings_of_a_sample_are_counted_once_for_a_batch(
    runtime: moonpool.Runtime, warmed: Warmed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a million of them, and 4,096 requests in a batch."""
    counted: list[str] = []

    def count(raw: Any, shape: Any, name: str) -> None:
        counted.append(name)
        check_bytes(raw, shape, name)

    monkeypatch.setattr(signature, "check_bytes", count)
    folder = write(tmp_path / "repository" / "m", s=b"\1\0\0\0a")
    strings = given("STRING", input_data_file="s")
    config = warmed.config(sample(batch_size=3, T=strings), input=[tensor("T", "STRING", 1)])
    with hosted(runtime, "m", folder, config):
        assert warmed.batches == [[{"T": [[b"a"]]}] * 3]
    # The load checks it, too.
    assert counted == ["T", "T"]


@pytest.mark.promise(
    "Containment", "A warm-up file is read by the runtime, and no link may lead it out of the model's folder."
)
@pytest.mark.parametrize("name", ["link", "../../secret", "missing", "fifo"])
def test_no_file_outside_of_the_folder_is_read(
    runtime: moonpool.Runtime, warmed: Warmed, tmp_path: Path, name: str
) -> None:
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "secret").write_bytes(b"1234")
    folder = write(tmp_path / "repository" / "m")
    (folder / "warmup" / "link").symlink_to(tmp_path / "repository" / "secret")
    os.mkfifo(folder / "warmup" / "fifo")
    with pytest.raises(LoadFailed, match="failed to open text file for read"):
        runtime.load("m", folder, config=warmed.config(sample(X=given(input_data_file=name))))


@pytest.mark.parametrize("controls", [{}, {"START": given("INT32", 1, input_data_file="one")}])
def test_a_sample_may_give_the_control_inputs_of_sequences(
    runtime: moonpool.Runtime, warmed: Warmed, tmp_path: Path, controls: dict[str, Any]
) -> None:
    folder = write(tmp_path / "repository" / "m", one=np.array([1], np.int32).tobytes())
    control = {"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}
    batching = {"control_input": [{"name": "START", "control": [control]}]}
    config = warmed.config(sample(X=given(), **controls), sequence_batching=batching)
    with hosted(runtime, "m", folder, config):
        assert warmed.batches == [[{**ZERO, **{name: [[1]] for name in controls}}]]


def test_a_load_may_be_given_up_while_it_warms_up(
    runtime: moonpool.Runtime, warmed: Warmed, in_background: Callable[..., Any]
) -> None:
    loading = in_background(runtime.load, "m", WARMED, config=warmed.config(sample(), does="hang"))
    wait_until(lambda: len(warmed.batches) == 1, PATIENCE_S)
    registry_of(runtime).give_up_loading()

    with pytest.raises(LoadFailed, match="the start of 'm_0' was interrupted"):
        loading.result(PATIENCE_S)


@pytest.fixture
def in_background() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        yield threads.submit


@pytest.mark.promise(
    "Models",
    "The data of warm-up samples takes memory for one sample at a time, and all samples together are no larger than "
    "`MOONPOOL_REGION_LIMIT_BYTES`.",
)
def test_all_samples_together_have_a_limit_that_names_its_option(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    limit = {"parameters": {"MOONPOOL_REGION_LIMIT_BYTES": "3M"}}
    with hosted(runtime, "m", quiet(tmp_path), large(3, 1 << 20) | limit):
        pass
    with pytest.raises(LoadFailed, match=r"up to 'S3' take 4194304 bytes.*MOONPOOL_REGION_LIMIT"):
        runtime.load("m", quiet(tmp_path), config=large(4, 1 << 20) | limit)


def test_one_sample_is_in_memory_at_a_time(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    # To read the file of a model takes 64 MiB for a moment.
    size_bytes = 40 << 20
    tracemalloc.start()
    try:
        with hosted(runtime, "m", quiet(tmp_path), large(4, size_bytes), instances=2):
            current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert current < size_bytes
    # Its data, and the numbers that a piece of it is made of.
    assert size_bytes < peak < 2 * size_bytes


def quiet(folder: Path) -> Path:
    """Write a model that takes anything and writes nothing down."""
    file = folder / "quiet.py"
    file.write_text(
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        return [pb_utils.InferenceResponse([]) for _ in requests]\n"
    )
    return file


def large(count: int, size_bytes: int) -> dict[str, Any]:
    samples = [sample(f"S{number}", X=given("FP32", size_bytes // 4, random_data=True)) for number in range(count)]
    return {"input": [tensor("X", "FP32", -1)], "output": [tensor("Y", "FP32", -1)], "model_warmup": samples}
