"""Tests the host of a process: without a runtime it refuses, and a test can set another one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

import moonpool.stub.pb_utils as pb_utils
from moonpool.stub.pb_utils import host
from moonpool.stub.pb_utils.host import Host

if TYPE_CHECKING:
    from moonpool.stub.pb_utils.response import Answer


class Desk(Host):
    """Answers at once, and records the calls."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def infer(self, request: pb_utils.InferenceRequest, decoupled: bool) -> Answer:
        self.asked.append((request, decoupled))
        return pb_utils.InferenceResponse([])

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        self.asked.append((name, config, files))

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        self.asked.append((name, unload_dependents))

    def is_model_ready(self, name: str, version: str) -> bool:
        self.asked.append((name, version))
        return True


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    host.use(desk)
    yield desk
    host.use(None)


def request() -> pb_utils.InferenceRequest:
    return pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="other")


def test_calls_of_a_model_reach_its_host(desk: Desk) -> None:
    asked = request()

    asked.exec()
    asked.exec(decoupled=True)
    pb_utils.load_model("m", "{}", {"file:1/model.py": b""})
    pb_utils.unload_model("m", unload_dependents=True)

    assert pb_utils.is_model_ready("m", "1")
    assert desk.asked == [(asked, False), (asked, True), ("m", "{}", {"file:1/model.py": b""}), ("m", True), ("m", "1")]


def test_where_nobody_hosts_the_process_everything_is_refused() -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: request().exec(), "BLS is only supported during the 'execute' function."),
        (lambda: pb_utils.load_model("m"), "Failed to load model 'm'"),
        (lambda: pb_utils.unload_model("m"), "Failed to unload model 'm'"),
        (lambda: pb_utils.is_model_ready("m"), "Failed to check the readiness of model 'm'"),
    ]
    for call, text in calls:
        with pytest.raises(pb_utils.TritonModelException, match=text):
            call()


def test_the_files_of_a_model_must_be_a_dictionary() -> None:
    with pytest.raises(
        pb_utils.TritonModelException,
        match="failed to load model 'm', files should be a dictionary of file paths and file contents",
    ):
        pb_utils.load_model("m", files=[b""])  # type: ignore[arg-type]


def iterator(*answers: pb_utils.InferenceResponse) -> pb_utils.ResponseIterator:
    left = iter(answers)
    return pb_utils.ResponseIterator.over(lambda seen: seen.extend(itertools.islice(left, 1)), lambda: None)


def test_responses_are_seen_again_by_a_second_loop() -> None:
    answers = [pb_utils.InferenceResponse([]) for _ in range(3)]
    responses = iterator(*answers)

    assert list(responses) == answers
    assert list(responses) == answers


def test_a_loop_goes_on_where_one_broke_off() -> None:
    answers = [pb_utils.InferenceResponse([]) for _ in range(3)]
    responses = iterator(*answers)
    for _ in responses:
        break

    assert list(responses) == answers[1:]
    assert list(responses) == answers
    with pytest.raises(StopIteration, match=r"^Iteration is done for the responses\.$"):
        next(responses)


def test_a_response_iterator_is_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match="is made by exec"):
        pb_utils.ResponseIterator()
