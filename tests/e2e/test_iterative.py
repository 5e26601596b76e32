"""Tests of requests that their model reschedules, in real processes: the loop of a generation, one batch a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, hosted, tensor
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import ResponseStream, SequenceLost

PATIENCE_S = 60.0
FOR_EVER = 10_000_000

NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
    "configured to handle such a flag."
)


def config(*, is_decoupled: bool, **batching: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "max_batch_size": 4,
        "input": [tensor("X", "FP32", 1)],
        "output": [tensor("Y", "FP32", 1)],
        "model_transaction_policy": {"decoupled": is_decoupled},
    }
    return made | ({"sequence_batching": batching} if batching else {})


class Client:
    """Ask the model to count down."""

    def __init__(self, runtime: moonpool.Runtime, folder: Path) -> None:
        self.runtime = runtime
        self.gate = folder / "gate"
        self._log = folder / "log"

    def send(self, steps: int, request_id: str = "r", timeout_s: float = PATIENCE_S, **more: Any) -> ResponseStream:
        options = {key: more.pop(key) for key in ("correlation_id", "flags") if key in more}
        return self.runtime.stream(
            "m",
            {"X": np.full((1, 1), steps, np.float32)},
            timeout_s=timeout_s,
            request_id=request_id,
            parameters={"log": str(self._log), **more},
            **options,
        )

    def ask(self, steps: int, request_id: str = "r", **more: Any) -> list[float]:
        """Return the content of each response."""
        return [each.outputs["Y"].item() for each in self.send(steps, request_id, **more)]

    def steps(self, request_id: str = "r") -> list[tuple[int, int]]:
        """Return the correlation id and the flags with which a request came, each time."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        rows = [line.split() for line in lines]
        return [(int(which), int(flags)) for name, which, flags in rows if name == request_id]


Serve = Callable[..., Any]


@pytest.fixture
def serve(runtime: moonpool.Runtime, tmp_path: Path) -> Serve:
    @contextmanager
    def served(*, is_decoupled: bool, **batching: Any) -> Iterator[Client]:
        made = config(is_decoupled=is_decoupled, **batching)
        with hosted(runtime, "m", MODELS / "generates.py", made):
            yield Client(runtime, tmp_path)

    return served


ITERATIVE = [{"iterative_sequence": True}, {"iterative_sequence": True, "oldest": {"max_candidate_sequences": 2}}]
every_strategy = pytest.mark.parametrize("batching", ITERATIVE)


@pytest.mark.promise(
    "Sequences",
    "A rescheduled request goes to the model again, in its slot and with flags 0, until it is "
    "answered, and shares batches with others.",
)
@every_strategy
def test_a_request_comes_again_until_it_is_answered(serve: Serve, batching: dict[str, Any]) -> None:
    with serve(is_decoupled=False, **batching) as client:
        assert client.ask(3) == [0]
        assert client.steps() == [(1, 1), (1, 0), (1, 0)]
        assert client.ask(1, "another") == [0]
        assert client.steps("another") == [(2, 1)]
        # Every step is counted, as in Triton.
        statistics = client.runtime.statistics("m")
        assert statistics["inference_stats"]["success"]["count"] == 4
        assert statistics["execution_count"] == 4


@pytest.mark.promise("Sequences", "A rescheduled request goes to …")
@every_strategy
def test_a_decoupled_model_responds_on_the_way(serve: Serve, batching: dict[str, Any]) -> None:
    with serve(is_decoupled=True, **batching) as client:
        assert client.ask(4) == [3, 2, 1, 0]
        assert client.steps() == [(1, 1), (1, 0), (1, 0), (1, 0)]
        assert client.ask(3, "silent", silent=True) == [0]
        assert client.steps("silent") == [(2, 1), (2, 0), (2, 0)]


@pytest.mark.promise("Sequences", "A rescheduled request goes to …")
@every_strategy
@pytest.mark.parametrize("is_decoupled", [False, True])
def test_generations_share_batches_and_the_next_one_takes_a_free_slot(
    serve: Serve, batching: dict[str, Any], *, is_decoupled: bool
) -> None:
    with serve(is_decoupled=is_decoupled, **batching) as client:
        lengths = [5, 1, 9, 3, 7, 2, 8, 4, 6, 10]
        # None of them goes on before all are there.
        streams = [client.send(steps, f"r{steps}", gate=str(client.gate)) for steps in lengths]
        client.gate.touch()
        for steps, stream in zip(lengths, streams, strict=True):
            found = [each.outputs["Y"].item() for each in stream]
            assert found == (list(range(steps - 1, -1, -1)) if is_decoupled else [0])
            assert [flags for _, flags in client.steps(f"r{steps}")] == [1] + [0] * (steps - 1)
        # The last response may arrive before the answer to its batch.
        wait_until(lambda: client.runtime.statistics("m")["inference_count"] == sum(lengths))
        assert client.runtime.statistics("m")["execution_count"] < sum(lengths)


def test_a_generation_may_have_an_id_of_its_own_for_as_long_as_it_lasts(serve: Serve) -> None:
    with serve(is_decoupled=True, iterative_sequence=True) as client:
        with pytest.raises(moonpool.InvalidRequest, match="sequence 7 to model 'm' must specify"):
            client.ask(3, correlation_id=7)
        assert client.ask(3, correlation_id=7, flags=3) == [2, 1, 0]
        assert client.steps() == [(7, 3), (7, 0), (7, 0)]
        with pytest.raises(moonpool.InvalidRequest, match="sequence 7 to model 'm' must specify"):
            client.ask(3, correlation_id=7)


def test_a_generation_is_not_idle_however_long_it_takes(serve: Serve) -> None:
    with serve(is_decoupled=True, iterative_sequence=True, max_sequence_idle_microseconds=1) as client:
        assert len(client.ask(200)) == 200


# Early ends


@pytest.mark.promise(
    "Sequences", "A caller who leaves, a death and an unload each end the loop of a rescheduled request."
)
@every_strategy
@pytest.mark.parametrize("is_decoupled", [False, True])
def test_a_client_that_leaves_ends_the_loop_and_frees_the_slot(
    serve: Serve, batching: dict[str, Any], *, is_decoupled: bool
) -> None:
    with serve(is_decoupled=is_decoupled, **batching) as client:
        streams = [client.send(FOR_EVER, f"r{i}") for i in range(4)]
        wait_until(lambda: len(client.steps("r0")) > 3)
        if is_decoupled:
            assert next(streams[0]).outputs["Y"].item() == FOR_EVER - 1
        for stream in streams:
            stream.close()
        assert client.ask(2)[-1] == 0
        scheduler = hosted_in(client.runtime, "m").scheduler
        wait_until(lambda: not scheduler.executing and not scheduler.queued)
        assert len(client.steps("r0")) < FOR_EVER


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_a_client_whose_time_is_over_ends_the_loop(serve: Serve, *, is_decoupled: bool) -> None:
    with serve(is_decoupled=is_decoupled, iterative_sequence=True) as client:
        with pytest.raises(moonpool.RequestTimedOut):
            client.ask(FOR_EVER, timeout_s=0.1)
        scheduler = hosted_in(client.runtime, "m").scheduler
        wait_until(lambda: not scheduler.executing and not scheduler.queued)


@pytest.mark.promise("Sequences", "A caller who leaves, a death …")
def test_generations_end_with_their_process_and_say_so(serve: Serve) -> None:
    with serve(is_decoupled=True, iterative_sequence=True, oldest={"preferred_batch_size": [1]}) as client:
        others = [client.send(FOR_EVER, f"r{i}") for i in range(2)]
        for stream in others:
            next(stream)  # the next process would go on with one that has not begun
        dying = client.send(5, "dying", dies_at=3)
        errors = []
        for stream in [dying, *others]:
            with pytest.raises((moonpool.StubDied, SequenceLost)) as caught:
                for _ in stream:
                    pass
            errors.append(type(caught.value))
        assert errors[0] is moonpool.StubDied
        assert client.ask(2) == [1, 0]


@pytest.mark.promise("Sequences", "A caller who leaves, a death …")
def test_unloading_gives_up_what_never_ends(tmp_path: Path) -> None:
    with moonpool.Runtime(drain_timeout_s=0.2) as runtime:
        made = config(is_decoupled=True, iterative_sequence=True)
        runtime.load("m", MODELS / "generates.py", config=made)
        client = Client(runtime, tmp_path)
        stream = client.send(FOR_EVER)
        next(stream)
        runtime.unload("m")
        with pytest.raises(moonpool.ModelUnavailable, match="is being unloaded"):
            for _ in stream:
                pass


# Features that do not exist, and mistakes


@pytest.mark.parametrize("is_decoupled", [False, True])
@pytest.mark.parametrize("batching", [{}, {"direct": {}}])
def test_without_iterative_sequences_it_is_an_error_in_tritons_words(
    serve: Serve, batching: dict[str, Any], *, is_decoupled: bool
) -> None:
    with serve(is_decoupled=is_decoupled, **batching) as client:
        with pytest.raises(moonpool.ModelError) as caught:
            client.ask(3, correlation_id=5, flags=1)
        assert NOT_ITERATIVE in str(caught.value)


def test_a_rescheduled_request_is_not_answered_as_well(serve: Serve) -> None:
    with serve(is_decoupled=False, iterative_sequence=True) as client:
        with pytest.raises(moonpool.ModelError) as caught:
            client.ask(3, answers_too=True)
        assert (
            "Expected a None object in the execute function return list for reschduled request, "
            "found type '<class 'c_python_backend_utils.InferenceResponse'>'."
        ) in str(caught.value)
        assert client.ask(2) == [0]


# Coroutines

COROUTINE = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    async def execute(self, requests):
        await asyncio.sleep(0)
        for request in requests:
            x = request.inputs()[0].as_numpy()
            which = request.correlation_id()
            if not which:  # an empty slot
                continue
            if request.flags() & 1:
                self.left[which] = int(x.item())
            self.left[which] -= 1
            response = pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", np.full_like(x, self.left[which]))])
            is_last = self.left[which] == 0
            if not is_last:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            request.get_response_sender().send(response, int(is_last))
"""


@pytest.mark.promise("Sequences", "A rescheduled request goes to …")
@every_strategy
def test_coroutines_reschedule_too(
    runtime: moonpool.Runtime, model_file: Callable[[str], Path], batching: dict[str, Any], tmp_path: Path
) -> None:
    with hosted(runtime, "m", model_file(COROUTINE), config(is_decoupled=True, **batching)):
        client = Client(runtime, tmp_path)
        streams = [client.send(20 + i) for i in range(6)]
        for i, stream in enumerate(streams):
            found = [each.outputs["Y"].item() for each in stream]
            assert found == list(range(19 + i, -1, -1))


@every_strategy
def test_a_coroutine_may_reschedule(runtime: moonpool.Runtime, batching: dict[str, Any]) -> None:
    made = config(is_decoupled=False, **batching)
    with hosted(runtime, "m", MODELS / "steps.py", made):
        for steps in (1, 5):
            inputs = {"X": np.full((1, 1), steps, np.float32)}
            assert runtime.infer("m", inputs, timeout_s=PATIENCE_S)["Y"].item() == steps


# Callers that are models

CALLER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        steps = request.inputs()[0]
        generation = pb_utils.InferenceRequest(
            model_name="m", requested_output_names=["Y"], inputs=[steps],
            parameters=json.loads(request.parameters()))
        found = [each.output_tensors()[0].as_numpy().item()
                 for each in generation.exec(decoupled=True) if each.output_tensors()]
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([found], np.float32))])
"""


@every_strategy
def test_a_model_may_ask_for_a_generation(
    serve: Serve, runtime: moonpool.Runtime, model_file: Callable[[str], Path], batching: dict[str, Any], tmp_path: Path
) -> None:
    caller = config(is_decoupled=False) | {"output": [tensor("Y", "FP32", -1)]}
    with serve(is_decoupled=True, **batching):
        with hosted(runtime, "caller", model_file(CALLER), caller):
            found = runtime.infer(
                "caller",
                {"X": np.full((1, 1), 4, np.float32)},
                timeout_s=PATIENCE_S,
                parameters={"log": str(tmp_path / "log")},
            )
        assert found["Y"].tolist() == [[3, 2, 1, 0]]
        log = (tmp_path / "log").read_text().splitlines()
        assert [line.split()[-1] for line in log] == ["1", "0", "0", "0"]
