"""Tests of models with state behind a sequence batcher, in real processes."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, hosted, tensor
from tests.e2e.sequence_client import END, PATIENCE_S, START, SequenceClient, Serve, Told, sequence_config, told
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import ResponseStream, SequenceLost

CONTROLS = [
    {"name": "START", "control": [{"kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0, 1]}]},
    {"name": "END", "control": [{"kind": "CONTROL_SEQUENCE_END", "bool_false_true": [False, True]}]},
    {"name": "READY", "control": [{"kind": "CONTROL_SEQUENCE_READY", "int32_false_true": [0, 7]}]},
    {"name": "ID", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64"}]},
]


def config(max_batch_size: int = 4, **batching: Any) -> dict[str, Any]:
    return sequence_config(max_batch_size, **batching)


class Client(SequenceClient):
    """Send a request written as `"7s"`: sequence 7, START. The id of a request is its text."""

    def send(self, request: str, x: float = 1, *, held: bool = False) -> ResponseStream:
        number = request.rstrip("abcse")
        suffix = request[len(number) :]
        which = int(number) if number.isdigit() else number
        flags = START * ("s" in suffix) | END * ("e" in suffix)
        return self.begin(which, x, flags, held=held, request_id=request)

    def ask(self, request: str, x: float = 1) -> Told:
        return told(self.send(request, x))


@pytest.fixture(scope="module")
def completes() -> bool:
    return True


@pytest.fixture
def serve(runtime: moonpool.Runtime, tmp_path: Path) -> Serve:
    @contextmanager
    def served(instances: int = 1, **batching: Any) -> Iterator[Client]:
        made = config(**batching)
        with hosted(runtime, "m", MODELS / "sequences.py", made, instances):
            yield Client(runtime, tmp_path, made["max_batch_size"])

    return served


STRATEGIES = [{"direct": {}}, {"oldest": {"max_candidate_sequences": 4}}, {}]


@pytest.mark.promise("Sequences", "The requests of a sequence go …")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_batch_size", [4, 0])
def test_every_sequence_has_its_own_state_however_many_there_are(
    serve: Serve, strategy: dict[str, Any], max_batch_size: int
) -> None:
    def run(client: Client, number: int) -> None:
        answers = [client.ask(f"{number}s", number)]
        answers += [client.ask(f"{number}", number) for _ in range(4)]
        answers.append(client.ask(f"{number}e", number))
        assert [each["sum"] for each in answers] == [number * n for n in range(1, 7)]
        assert [each["flags"] for each in answers] == [START, 0, 0, 0, 0, END]
        assert len({each["instance"] for each in answers}) == 1
        assert {each["which"] for each in answers} == {number}

    with serve(2, max_batch_size=max_batch_size, **strategy) as client:
        with ThreadPoolExecutor(12) as pool:
            for done in [pool.submit(run, client, number) for number in range(1, 25)]:
                done.result(PATIENCE_S)
        statistics = client.runtime.statistics("m")
        assert statistics["inference_stats"]["success"]["count"] == 24 * 6
        assert statistics["inference_stats"]["fail"]["count"] == 0


@pytest.mark.promise("Sequences", "The requests of a sequence go …")
def test_requests_sent_one_after_the_other_arrive_so_without_waiting_for_answers(serve: Serve) -> None:
    with serve() as client:
        streams = [client.send("text-s", 1)] + [client.send("text-", n) for n in range(2, 30)]
        sums = [told(stream)["sum"] for stream in [*streams, client.send("text-e", 0)]]
        assert sums == [n * (n + 1) / 2 for n in range(1, 30)] + [435]


SLOW = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.seen = []
        self.running = 0

    async def execute(self, requests):
        self.running += 1
        for request in requests:
            self.seen.append(float(request.inputs()[0].as_numpy().item()))
            await asyncio.sleep(0.002)
            self.seen.append(self.running)
        self.running -= 1
        shown = np.array([[str(self.seen)]], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", shown)]) for _ in requests]
"""


@pytest.mark.promise("Sequences", "With sequences, coroutines of a model that is not decoupled do not overlap.")
def test_coroutines_of_a_sequence_do_not_overlap(
    runtime: moonpool.Runtime, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    with hosted(runtime, "m", model_file(SLOW), config()):
        client = Client(runtime, tmp_path)
        streams = [client.send("5s", 2)] + [client.send("5", x) for x in range(3, 12)]
        *_, (last,) = streams
        seen = json.loads(last.outputs["Y"].item())
        assert seen == [each for x in range(2, 12) for each in (float(x), 1)]
        del last


def test_a_client_may_not_give_a_control_input(serve: Serve) -> None:
    x = np.ones((1, 1), np.float32)
    with serve() as client, pytest.raises(moonpool.InvalidRequest, match="unexpected inference input 'START'"):
        client.runtime.infer("m", {"X": x, "START": x}, correlation_id=1, flags=1)


# The examples of the page


def example(name: str, folder: Path) -> Path:
    path = Path(__file__).parents[2] / "docs" / "TRITON_MODELS.md"
    if not path.exists():
        pytest.skip("only the tests are here, without the documents")
    page = path.read_text()
    file = folder / Path(name).name
    file.write_text(page.partition(f"```python\n# {name}\n")[2].partition("```")[0])
    return file


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_sums_of_the_page_are_right(runtime: moonpool.Runtime, tmp_path: Path, strategy: dict[str, Any]) -> None:
    made = config(**strategy) | {"output": [tensor("SUM", "FP32", 1)]}
    caller: dict[str, Any] = {}
    exec(example("ask_sums.py", tmp_path).read_text(), caller)
    with hosted(runtime, "sums", example("sums/1/model.py", tmp_path), made):
        assert caller["ask"](runtime).tolist() == [[6]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_generation_of_the_page_counts_down(
    runtime: moonpool.Runtime, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    made = config(iterative_sequence=True, **strategy) | {"output": [tensor("LEFT", "FP32", 1)]}
    made["model_transaction_policy"] = {"decoupled": True}
    with hosted(runtime, "m", example("count_down/1/model.py", tmp_path), made):
        streams = [runtime.stream("m", {"X": [[float(n)]]}, timeout_s=60.0) for n in (3, 5, 2)]
        found = [[each.outputs["LEFT"].item() for each in stream] for stream in streams]
    assert found == [[2, 1, 0], [4, 3, 2, 1, 0], [1, 0]]


NATIVE = """
import numpy as np
from moonpool import Batch, Float32, Int64

class Sums:
    max_batch_size = 4

    def __init__(self):
        self.sums = {}

    def __call__(
        self, X: Float32[Batch, 1], START: Float32[Batch, 1], ID: Int64[Batch, 1]
    ) -> Float32[Batch, 1]:
        sums = np.zeros_like(X)
        for row, which in enumerate(ID.ravel().tolist()):
            if START[row]:
                self.sums[which] = 0
            self.sums[which] = self.sums.get(which, 0) + X[row]
            sums[row] = self.sums[which]
        return sums
"""


@pytest.mark.promise("Sequences", "Native models learn from control inputs to which sequences their rows belong.")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moonpools_own_models_get_sequences_by_control_inputs(
    runtime: moonpool.Runtime, model_file: Callable[[str], Path], strategy: dict[str, Any]
) -> None:
    number = {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_INT64"}
    controls = [CONTROLS[0], {"name": "ID", "control": [number]}]
    made = {"sequence_batching": {"control_input": controls, **strategy}}
    with hosted(runtime, "m", model_file(NATIVE), made):
        for flags, wanted in ((START, 1), (0, 2), (END, 3)):
            for which in (1, 2, 3):
                inputs = {"X": np.full((1, 1), which, np.float32)}
                found = runtime.infer("m", inputs, correlation_id=which, flags=flags)
                assert found["OUTPUT0"].item() == wanted * which


# Slots


@pytest.mark.promise(
    "Sequences",
    "In direct mode a slot is a place in the batch. Empty places before the last occupied one "
    "are filled with zeros and are not READY. They count in no statistics but the sizes of "
    "batches.",
)
def test_places_in_a_direct_batch_are_kept_and_empty_ones_are_zeros(serve: Serve) -> None:
    with serve(control_input=CONTROLS) as client:
        for number in (1, 2, 3):
            client.ask(f"{number}s")
        only = client.ask("3a", 5)
        assert only["place"] == 2
        assert only["batch"] == ["", "", "3a"]
        held = client.send("1a", held=True)
        behind = [client.send(each) for each in ("3b", "1b")]
        client.open()
        assert told(held)["batch"] == ["1a"]
        assert [told(each)["batch"] for each in behind] == [["1b", "", "3b"]] * 2
        # Empty slots count in the sizes of batches only.
        statistics = client.runtime.statistics("m")
        assert statistics["inference_count"] == 7
        assert {each["batch_size"] for each in statistics["batch_stats"]} == {1, 2, 3}


@pytest.mark.promise("Sequences", "In direct mode a slot …")
def test_an_empty_slot_has_zeros_and_is_not_ready(
    runtime: moonpool.Runtime, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    model = model_file(
        f"""
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        seen = [
            [request.correlation_id(), request.flags(), sorted(request.requested_output_names()),
             {{t.name(): [str(t.as_numpy().dtype), t.as_numpy().tolist()] for t in request.inputs()
               if t.name() != "T"}},
             repr([t.as_numpy() for t in request.inputs() if t.name() == "T"])]
            for request in requests
        ]
        with open({str(seen)!r}, "a") as file:
            file.write(json.dumps(seen) + "\\n")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())])
                for r in requests]
"""
    )
    made = config(control_input=CONTROLS)
    made["input"].append(tensor("T", "STRING", 2))
    made["output"] = [tensor("Y", "FP32", 1)]
    inputs = {"X": np.ones((1, 1), np.float32), "T": np.array([[b"ab", b"c"]], object)}
    with hosted(runtime, "m", model, made):
        for number in (5, 6):
            runtime.infer("m", inputs, correlation_id=number, flags=START)
        runtime.infer("m", inputs, correlation_id=6, flags=END)
    first, _, last = map(json.loads, seen.read_text().splitlines())
    controls = {"START": ["float32", [[1.0]]], "END": ["bool", [[False]]]}
    controls |= {"READY": ["int32", [[7]]], "ID": ["uint64", [[5]]]}
    assert first == [[5, 1, ["Y"], {"X": ["float32", [[1.0]]], **controls}, first[0][4]]]
    assert "b'ab', b'c'" in first[0][4]
    empty, full = last
    controls = {"START": ["float32", [[0.0]]], "END": ["bool", [[False]]]}
    controls |= {"READY": ["int32", [[0]]], "ID": ["uint64", [[0]]]}
    assert empty[:4] == [0, 0, [], {"X": ["float32", [[0.0]]], **controls}]
    assert "[[b'', b'']]" in empty[4]
    controls = {"START": ["float32", [[0.0]]], "END": ["bool", [[True]]]}
    controls |= {"READY": ["int32", [[7]]], "ID": ["uint64", [[6]]]}
    assert full[:4] == [6, 2, ["Y"], {"X": ["float32", [[1.0]]], **controls}]


def test_texts_are_ids_where_the_input_for_ids_is_one(serve: Serve) -> None:
    control = {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_STRING"}
    with serve(control_input=[{"name": "ID", "control": [control]}], max_batch_size=0) as client:
        found = client.ask("a text, longer than others.s")
        assert found["controls"]["ID"] == ["object", [1], "b'a text, longer than others.'"]
        client.ask("a text, longer than others.e")
        assert client.ask("12s")["controls"]["ID"] == ["object", [1], "b'12'"]
    with serve(control_input=CONTROLS) as client:
        with pytest.raises(moonpool.InvalidRequest) as caught:
            client.ask("texts")
        assert str(caught.value) == (
            "correlation ID 'text' is no number; model 'm' takes it as input 'ID' of data-type UINT64"
        )


@pytest.mark.promise("Sequences", "If there are more sequences …")
def test_sequences_over_the_slots_wait_until_one_ends_or_is_idle_for_too_long(serve: Serve) -> None:
    # The first sequence ends by its own request, not by this idle time.
    with serve(max_batch_size=1, max_sequence_idle_microseconds=5_000_000) as client:
        client.ask("1s")
        second, third = client.send("2s"), client.send("3s")
        assert client.ask("1e")["sum"] == 2
        assert told(second)["which"] == 2
        assert told(third)["which"] == 3  # sequence 2 was idle for too long
        with pytest.raises(moonpool.InvalidRequest, match="sequence 2 to model 'm' must specify"):
            client.ask("2")


def test_a_sequence_that_starts_while_it_is_there_is_warned_of(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with serve() as client, caplog.at_level(logging.WARNING, "moonpool"):
        assert [client.ask(each)["sum"] for each in ("1s", "1a", "1s", "1a")] == [1, 2, 1, 2]
    assert (
        "sequence 1 for model 'm' has a conflict. The previous sequence did not end before this "
        "sequence start. Previous sequence will be terminated early."
    ) in caplog.text


def test_nothing_of_a_sequence_batcher_is_without_effect(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moonpool"), serve(control_input=CONTROLS) as client:
        client.ask("1s")
    assert "has no effect" not in caplog.text


FORWARDS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.forward(request) for request in requests]

    def forward(self, request):
        asked = pb_utils.InferenceRequest(
            model_name="m", requested_output_names=["Y"], inputs=request.inputs(),
            request_id=request.request_id(), correlation_id=request.correlation_id(),
            flags=request.flags())
        answer = asked.exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        return pb_utils.InferenceResponse(answer.output_tensors())
"""


def test_a_model_may_ask_a_model_with_sequences(
    serve: Serve, runtime: moonpool.Runtime, model_file: Callable[[str], Path]
) -> None:
    forwards = config()
    del forwards["sequence_batching"]
    x = {"X": np.ones((1, 1), np.float32)}
    with serve(), hosted(runtime, "forwards", model_file(FORWARDS), forwards):
        sums = []
        for flags in (START, 0, END):
            found = runtime.infer("forwards", x, timeout_s=PATIENCE_S, correlation_id=9, flags=flags)
            sums.append(json.loads(found["Y"].item())["sum"])
        assert sums == [1, 2, 3]
        with pytest.raises(moonpool.ModelError, match="sequence 9 to model 'm' must specify"):
            runtime.infer("forwards", x, timeout_s=PATIENCE_S, correlation_id=9)


# Callers that give up, models that unload, processes that die


def test_a_request_whose_caller_left_is_not_executed(serve: Serve) -> None:
    with serve() as client:
        held = client.send("1s", 1, held=True)
        left, after = client.send("1a", 10), client.send("1b", 100)
        left.close()
        client.open()
        assert [told(held)["sum"], told(after)["sum"]] == [1, 101]


@pytest.mark.promise(
    "Sequences",
    "An unload serves the requests that wait behind running sequences, even if nobody ends those sequences.",
)
def test_unloading_serves_the_backlog_though_nobody_ends_the_sequences(
    runtime: moonpool.Runtime, tmp_path: Path
) -> None:
    with hosted(runtime, "m", MODELS / "sequences.py", config(max_batch_size=1)):
        client = Client(runtime, tmp_path)
        client.ask("1s")
        waiting = [client.send("2s"), client.send("3s"), client.send("2a")]
    assert [told(each)["which"] for each in waiting] == [2, 3, 2]


@pytest.mark.promise(
    "Sequences",
    "When an instance dies, its sequences are lost, and their next requests get an error that "
    "says so. Sequences that had not begun begin elsewhere.",
)
def test_with_its_process_a_sequence_is_lost_and_says_so(serve: Serve) -> None:
    with serve(2) as client:
        first, second = client.ask("1s"), client.ask("2s")
        client.ask("3s")
        assert first["instance"] != second["instance"]
        dying = client.send("1", -1)
        behind = client.send("1a")
        with pytest.raises(moonpool.StubDied):
            told(dying)
        with pytest.raises(SequenceLost) as caught:
            told(behind)
        assert str(caught.value) == (
            "sequence 1 of model 'm' is lost, as the instance ended that had its state; start it again"
        )
        assert caught.value.code == "UNAVAILABLE"
        with pytest.raises(SequenceLost, match="sequence 3 of model 'm' is lost"):
            client.ask("3")
        assert client.ask("2")["sum"] == 2
        assert client.ask("1s", 5)["sum"] == 5
        assert client.ask("1e", 5)["sum"] == 10


def test_a_sequence_whose_process_is_killed_while_it_is_idle_is_lost(serve: Serve) -> None:
    with serve() as client:
        client.ask("1s")
        (instance,) = client.runtime.instances("m")
        os.kill(instance["pid"], signal.SIGKILL)
        with pytest.raises((SequenceLost, moonpool.StubDied)):
            client.ask("1")
        assert client.ask("1s")["sum"] == 1
        wait_until(lambda: client.runtime.instances("m")[0]["restarts"] == 1)


def test_a_request_that_starts_a_sequence_can_be_tried_again(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    made = config() | {"parameters": {"MOONPOOL_RETRY": {"string_value": "yes"}}}
    with hosted(runtime, "m", MODELS / "sequences.py", made):
        client = Client(runtime, tmp_path)
        held = client.send("1s", held=True)
        wait_until(lambda: hosted_in(runtime, "m").scheduler.executing == 1)
        os.kill(runtime.instances("m")[0]["pid"], signal.SIGKILL)
        client.open()
        assert told(held)["sum"] == 1
        assert client.ask("1e")["sum"] == 2
