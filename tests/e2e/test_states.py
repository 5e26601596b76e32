"""Tests of states of sequences that the runtime keeps, with models of every kind in real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, hosted, options, tensor
from tests.e2e.sequence_client import END, PATIENCE_S, START, SequenceClient, Serve, sequence_config, told
from tests.inside import queue_of
from tests.waiting import wait_until

import moonpool
from moonpool import MoonpoolError, ResponseStream, SequenceLost

pytestmark = pytest.mark.promise(
    "Sequences",
    "A model gets the states of its configuration as inputs: each is the output of the last answer in its sequence, "
    "or the initial value.",
)

STATE = {"input_name": "TOTAL_IN", "output_name": "TOTAL_OUT", "data_type": "TYPE_FP32"}
QUICKLY = options(RESTART_BACKOFF_S=0, RESTART_BACKOFF_MAX_S=0, MAX_RESTARTS=1000)


def config(
    max_batch_size: int = 4, dims: int = 1, state: dict[str, Any] | None = None, **batching: Any
) -> dict[str, Any]:
    states = [{**STATE, "dims": [dims], **(state or {})}]
    return sequence_config(max_batch_size, state=states, **batching)


class Client(SequenceClient):
    @property
    def used_bytes(self) -> int:
        return int(queue_of(self.scheduler).states.used_bytes)

    def send(self, which: int, x: float, flags: int = 0, how: str = "", *, held: bool = False) -> ResponseStream:
        return self.begin(which, x, flags, held=held, answer=how)

    def ask(self, which: int, x: float, flags: int = 0, how: str = "") -> Any:
        """Return the state that the model got."""
        before = told(self.send(which, x, flags, how))["before"]
        return before[0] if len(before) == 1 else before


@pytest.fixture(scope="module")
def completes() -> bool:
    return True


@pytest.fixture
def serve(runtime: moonpool.Runtime, tmp_path: Path) -> Serve:
    @contextmanager
    def served(instances: int = 1, more: Any = QUICKLY, **batching: Any) -> Iterator[Client]:
        made = {**config(**batching), **more}
        with hosted(runtime, "m", MODELS / "states.py", made, instances):
            yield Client(runtime, tmp_path, made["max_batch_size"])

    return served


STRATEGIES = [{"direct": {}}, {"oldest": {"max_candidate_sequences": 4}}, {"max_batch_size": 0}]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["direct", "oldest", "one by one"])
def test_a_state_goes_from_answer_to_request(serve: Serve, strategy: dict[str, Any]) -> None:
    with serve(**strategy) as client:
        assert client.ask(7, 1, START) == 0
        assert client.ask(7, 2) == 1
        if strategy.get("max_batch_size") != 0:  # a second slot
            assert client.ask(8, 5, START) == 0
            assert client.ask(8, 5) == 5
        assert client.ask(7, 4, how="keep") == 3
        assert client.ask(7, 4, how="place") == 7  # the model wrote into its input
        assert client.ask(7, 1, END) == 7
        # Every start begins anew, also within a sequence.
        assert client.ask(7, 1, START) == 0
        assert client.ask(7, 1, START) == 0
        assert client.ask(7, 1, END) == 1


@pytest.mark.parametrize("how", ["shape", "type", "error"])
def test_what_is_no_state_fails_its_request_alone(serve: Serve, how: str) -> None:
    text = {
        "shape": r"state 'TOTAL_OUT' of model 'm' has the shape \[1, 1, 2\], and must have \[1, 1\]",
        "type": "state 'TOTAL_OUT' of model 'm' has the data-type INT64, and must be FP32",
        "error": "on purpose",
    }[how]
    with serve() as client:
        client.ask(7, 1, START)
        with pytest.raises(MoonpoolError, match=text):
            client.ask(7, 2, how=how)
        assert client.ask(7, 4) == 1


def test_an_answer_that_comes_later_brings_its_state_before_the_next_request(serve: Serve) -> None:
    with serve() as client:
        client.ask(7, 1, START, "later")
        first, second = client.send(7, 2, how="later"), client.send(7, 4)
        assert [told(first)["before"], told(second)["before"]] == [[1], [3]]


def test_a_state_of_variable_size_grows(serve: Serve) -> None:
    with serve(dims=-1) as client:
        assert client.ask(7, 1, START, "grow") == 0
        assert client.ask(7, 2, 0, "grow") == [0, 1]
        assert client.ask(7, 3, END) == [0, 1, 2]


def test_states_have_a_limit_and_are_freed_with_their_sequences(serve: Serve) -> None:
    with serve(more=options(STATE_LIMIT_BYTES="1M"), dims=-1) as client:
        initial_bytes = client.used_bytes
        client.ask(7, 1, START)
        with pytest.raises(MoonpoolError, match="MOONPOOL_STATE_LIMIT_BYTES allows 1048576"):
            client.ask(7, 1, how="huge")
        assert client.ask(7, 1) == 1
        assert client.used_bytes > initial_bytes
        client.ask(7, 1, END)
        wait_until(lambda: client.used_bytes == initial_bytes, PATIENCE_S, "the state to be freed")


def test_versions_of_a_model_share_the_limit_of_their_states(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m"
    for version in "12":
        (folder / version).mkdir(parents=True)
        (folder / version / "model.py").write_text((MODELS / "states.py").read_text())
    made = {**config(dims=-1), "version_policy": {"all": {}}, **options(STATE_LIMIT_BYTES="1500K")}

    def huge(version: int) -> None:
        x = np.ones((1, 1), np.float32)
        how = {"answer": "huge"}
        runtime.infer("m", {"X": x}, version=version, correlation_id=7, flags=START, parameters=how)

    with hosted(runtime, "m", folder, made):
        huge(1)
        with pytest.raises(MoonpoolError, match=r"in all its versions, .*MOONPOOL_STATE_LIMIT_BYTES"):
            huge(2)


def test_the_state_of_a_sequence_that_times_out_is_freed(serve: Serve) -> None:
    with serve(max_sequence_idle_microseconds=200_000) as client:
        initial_bytes = client.used_bytes
        # A sequence does not time out while requests of it wait or are executed.
        first = client.send(7, 1, START, held=True)
        second = client.send(7, 1)
        client.gate.touch()
        assert [told(first)["before"], told(second)["before"]] == [[0], [1]]
        del first, second  # a request keeps its state
        wait_until(lambda: client.used_bytes == initial_bytes, PATIENCE_S, "the state to be freed")


def test_a_sequence_starts_with_the_value_of_a_file(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    initial = {"name": "i", "data_type": "TYPE_FP32", "dims": [1], "data_file": "five"}
    folder = tmp_path / "models" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text((MODELS / "states.py").read_text())
    (folder / "initial_state").mkdir()
    (folder / "initial_state" / "five").write_bytes(np.float32(5).tobytes())
    made = config(state={"initial_state": [initial]})
    with hosted(runtime, "m", folder, made):
        client = Client(runtime, tmp_path)
        assert client.ask(7, 1, START) == 5
        assert client.ask(7, 1, END) == 6
    (folder / "initial_state" / "five").write_bytes(b"12")
    with pytest.raises(MoonpoolError, match="expects 4 bytes, but the data provided from five"):
        runtime.load("m", folder, config=made)
    (folder / "initial_state" / "five").unlink()
    with pytest.raises(MoonpoolError, match="failed to open text file for read"):
        runtime.load("m", folder, config=made)
    (folder / "initial_state" / "five").symlink_to("/etc/hostname")
    with pytest.raises(MoonpoolError, match="failed to open text file for read"):
        runtime.load("m", folder, config=made)


def test_an_initial_state_says_how_large_a_variable_one_is(serve: Serve) -> None:
    initial = {"name": "i", "data_type": "TYPE_FP32", "dims": [3], "zero_data": True}
    with serve(dims=-1, state={"initial_state": [initial]}) as client:
        assert client.ask(7, 1, START | END, "grow") == [0, 0, 0]


@pytest.mark.parametrize("data_type", ["TYPE_FP32", "TYPE_STRING"])
def test_an_initial_state_beyond_the_limit_fails_the_load_before_it_is_made(
    runtime: moonpool.Runtime, data_type: str
) -> None:
    initial = {"name": "i", "data_type": data_type, "dims": [1 << 38], "zero_data": True}
    made = config(dims=-1, state={"data_type": data_type, "initial_state": [initial]})
    with pytest.raises(moonpool.LoadFailed, match=r"takes \d{13} bytes, and MOONPOOL_STATE_LIMIT_BYTES leaves"):
        runtime.load("m", MODELS / "states.py", config=made)


def test_a_state_that_is_an_output_too_reaches_clients_that_want_it(runtime: moonpool.Runtime) -> None:
    made = config()
    made["output"].append(tensor("TOTAL_OUT", "FP32", 1))
    x = {"X": np.ones((1, 1), np.float32)}
    with hosted(runtime, "m", MODELS / "states.py", made):

        def ask(flags: int, outputs: list[str] | None = None) -> dict[str, Any]:
            return runtime.infer("m", x, timeout_s=PATIENCE_S, correlation_id=7, flags=flags, outputs=outputs)

        assert ask(START)["TOTAL_OUT"].tolist() == [[1]]
        assert set(ask(0, ["Y"])) == {"Y"}
        assert ask(END, ["TOTAL_OUT"])["TOTAL_OUT"].tolist() == [[3]]


def test_a_client_may_not_name_a_state(serve: Serve) -> None:
    with serve() as client:
        x = np.ones((1, 1), np.float32)
        with pytest.raises(MoonpoolError, match="unexpected inference input 'TOTAL_IN'"):
            client.runtime.infer("m", {"X": x, "TOTAL_IN": x}, correlation_id=1, flags=START)
        with pytest.raises(MoonpoolError, match="unexpected inference output 'TOTAL_OUT'"):
            client.runtime.infer("m", {"X": x}, outputs=["TOTAL_OUT"], correlation_id=1, flags=START)


SURVIVES = options(STATE_SURVIVES="yes", RESTART_BACKOFF_S=0, RESTART_BACKOFF_MAX_S=0, MAX_RESTARTS=1000)


@pytest.mark.promise(
    "Sequences",
    "With `MOONPOOL_STATE_SURVIVES`, a sequence outlives its instance and goes on with the states after its last "
    "answer.",
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["direct", "oldest", "one by one"])
def test_a_sequence_goes_on_after_its_instance_died(serve: Serve, strategy: dict[str, Any]) -> None:
    with serve(more=SURVIVES, **strategy) as client:
        client.ask(7, 1, START)
        client.ask(7, 2)
        with pytest.raises(moonpool.StubDied):
            client.ask(7, -1)
        assert client.ask(7, 4) == 3  # nothing of the request that failed
        # The last request of a sequence may be sent once more, too.
        with pytest.raises(moonpool.StubDied):
            client.ask(7, -1, END)
        assert client.ask(7, 1, END) == 7
        with pytest.raises(moonpool.InvalidRequest, match="START"):
            client.ask(7, 1)


def test_requests_that_wait_outlive_the_instance_with_their_sequence(serve: Serve) -> None:
    with serve(more=SURVIVES) as client:
        client.ask(7, 1, START)
        dying = client.send(7, -1, held=True)
        waiting = [client.send(7, 2), client.send(7, 4, END), client.send(8, 1, START)]
        client.gate.touch()
        with pytest.raises(moonpool.StubDied):
            told(dying)
        assert [told(each)["before"] for each in waiting] == [[1], [3], [0]]


def test_a_sequence_without_an_answer_is_lost_with_its_instance(serve: Serve) -> None:
    with serve(more=SURVIVES) as client:
        dying = client.send(7, -1, START, held=True)
        waiting = client.send(7, 2)
        client.gate.touch()
        with pytest.raises(moonpool.StubDied):
            told(dying)
        with pytest.raises(SequenceLost):
            told(waiting)


def test_sequences_are_lost_with_their_instance_unless_they_may_survive(serve: Serve) -> None:
    with serve() as client:
        client.ask(7, 1, START)
        with pytest.raises(moonpool.StubDied):
            client.ask(7, -1)
        with pytest.raises(SequenceLost):
            client.ask(7, 1)
        assert client.ask(7, 1, START) == 0


def test_an_idempotent_request_is_tried_again_in_its_place(serve: Serve) -> None:
    both = {**SURVIVES["parameters"], **options(RETRY="yes")["parameters"]}
    with serve(more={"parameters": both}) as client:
        client.ask(7, 1, START)
        pid = client.runtime.instances("m")[0]["pid"]
        held = client.send(7, 2, held=True)
        os.kill(pid, signal.SIGKILL)
        client.gate.touch()
        assert told(held)["before"] == [1]
        assert client.ask(7, 4) == 3


NATIVE = """
from moonpool import Batch, Float32, Outputs


class Totals:
    max_batch_size = 4

    def __call__(
        self, X: Float32[Batch, 1], TOTAL_IN: Float32[Batch, 1]
    ) -> Outputs(Y=Float32[Batch, 1], TOTAL_OUT=Float32[Batch, 1]):
        return {"Y": X * 10 + TOTAL_IN, "TOTAL_OUT": X + TOTAL_IN}
"""


def test_a_native_model_has_parameters_and_results_for_states(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    (tmp_path / "totals.py").write_text(NATIVE)
    made = {"sequence_batching": {"state": [{**STATE, "dims": [1]}]}}
    with hosted(runtime, "m", tmp_path / "totals.py", made):
        config = runtime.config("m")
        assert [each.name for each in (*config.inputs, *config.outputs)] == ["X", "Y"]

        def ask(which: int, x: float, flags: int = 0) -> float:
            outputs = runtime.infer("m", {"X": [[x]]}, timeout_s=PATIENCE_S, correlation_id=which, flags=flags)
            assert list(outputs) == ["Y"]
            return float(outputs["Y"][0, 0])

        assert [ask(7, 1, START), ask(8, 5, START), ask(7, 2), ask(8, 1), ask(7, 1, END)] == [10, 50, 21, 15, 13]  # fmt: skip


def test_a_warm_up_gives_the_initial_state(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    sample = {"name": "S", "batch_size": 2}
    sample["inputs"] = {"X": {"data_type": "TYPE_FP32", "dims": [1], "zero_data": True}}
    with hosted(runtime, "m", MODELS / "states.py", {**config(), "model_warmup": [sample]}):
        assert Client(runtime, tmp_path).ask(7, 1, START) == 0


def test_a_sequence_goes_on_in_another_instance(serve: Serve) -> None:
    slow = options(STATE_SURVIVES="yes", RESTART_BACKOFF_S=3600, RESTART_BACKOFF_MAX_S=3600)
    with serve(2, slow, max_batch_size=0) as client:
        first = told(client.send(7, 1, START))["instance"]
        with pytest.raises(moonpool.StubDied):
            client.ask(7, -1)
        # It was restarted at once. The second restart takes an hour.
        second = told(client.send(7, 2))
        while second["instance"] == first:
            with pytest.raises(moonpool.StubDied):
                client.ask(7, -1)
            second = told(client.send(7, 0))
        assert second["before"][0] in (1, 3)
