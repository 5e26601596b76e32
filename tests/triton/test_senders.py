"""Responses that models send themselves: how many, with which flags, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tests.triton.answers import Failure, Inputs
from tests.triton.both import Both

pytestmark = [pytest.mark.triton, pytest.mark.promise("Fidelity", "Whatever `execute` returns, raises or …")]


def code(*lines: str) -> Inputs:
    return {"CODE": np.array(["\n".join(lines).encode()], object)}


# Each case ends its request, because one that Triton never ends cannot be compared.
ONE = {
    "a response with the flag": ["sender.send(y(1), FINAL)"],
    "a response, then the flag": ["sender.send(y(1))", "sender.send(flags=FINAL)"],
    "by name": ["sender.send(response=y(1), flags=FINAL)"],
    "an error": ["sender.send(failed(), FINAL)"],
    "an error with a code": ["sender.send(failed('gone', pb_utils.TritonError.NOT_FOUND), FINAL)"],
    "a response without outputs": ["sender.send(pb_utils.InferenceResponse([]), FINAL)"],
    "strings": [
        "t = pb_utils.Tensor('T', np.array([b'a', b''], object))",
        "sender.send(pb_utils.InferenceResponse([t]), FINAL)",
    ],
    "None in a list": ["sender.send(y(1), FINAL)", "returned = [None]"],
    "from a thread": ["thread = threading.Thread(target=lambda: sender.send(y(1), FINAL))", "thread.start()"],
    "another sender of the request": ["request.get_response_sender().send(y(1), FINAL)"],
    "a second response": [
        "sender.send(y(1))",
        "attempt(sender.send, y(2))",
        "attempt(sender.send, y(2), FINAL)",
        "sender.send(flags=FINAL)",
    ],
    "the flag before a response": ["attempt(sender.send, flags=FINAL)", "sender.send(y(1), FINAL)"],
    "anything after the end": [
        "sender.send(y(1), FINAL)",
        "attempt(sender.send, flags=FINAL)",
        "attempt(sender.send, y(2))",
        "attempt(sender.send, y(2), FINAL)",
        "attempt(sender.send, failed())",
        "attempt(sender.send)",
        "attempt(sender.send, flags=7)",
    ],
    "wrong arguments": [
        "attempt(sender.send)",
        "attempt(sender.send, None)",
        "attempt(sender.send, None, 0)",
        "attempt(sender.send, y(1), 2)",
        "attempt(sender.send, None, 3)",
        "attempt(sender.send, y(1), -1)",
        "attempt(sender.send, flags=2**31)",
        "sender.send(y(1), FINAL)",
    ],
    "a sender of a request of its own": [
        "own = pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name='m')",
        "attempt(own.get_response_sender().send, y(1))",
        "attempt(own.get_response_sender().send, flags=FINAL)",
        "attempt(own.get_response_sender().send, flags=5)",
        "sender.send(y(1), FINAL)",
    ],
    "is_cancelled": ["attempt(sender.is_cancelled)", "attempt(request.is_cancelled)", "sender.send(y(1), FINAL)"],
}
WRONG_TYPES = {
    "send an error": "sender.send(pb_utils.TritonError('x'))",
    "send a tensor": "sender.send(pb_utils.Tensor('Y', np.zeros(1)))",
    "send a list": "sender.send([y(1)])",
    "send a text": "sender.send('text')",
    "flags are a text": "sender.send(y(1), 'x')",
    "flags are None": "sender.send(y(1), None)",
    "flags are a number": "sender.send(y(1), 1.0)",
    "three arguments": "sender.send(y(1), 0, 0)",
    "an unknown argument": "sender.send(y(1), final=True)",
    "close": "sender.close()",
}


@pytest.mark.promise("Responses at any time", "A sender refuses wrong use with Triton's texts.")
@pytest.mark.parametrize("name", ONE)
def test_a_model_that_answers_once_may_send_the_answer(both: Both, name: str) -> None:
    both.infer("sends", code(*ONE[name]))
    both.log("sends")


@pytest.mark.parametrize("name", ONE)
def test_a_decoupled_model_may_send_the_same(both: Both, name: str) -> None:
    if name == "a response without outputs":
        pytest.skip("over gRPC it looks like the end of the stream")
    lines = [line for line in ONE[name] if not line.startswith("returned")]

    both.stream("streams", code(*lines))
    both.log("streams")


@pytest.mark.parametrize("name", WRONG_TYPES)
@pytest.mark.parametrize("model", ["sends", "streams"])
def test_arguments_of_wrong_types_are_type_errors(both: Both, model: str, name: str) -> None:
    lines = [
        f"try: {WRONG_TYPES[name]}",
        "except Exception as error: attempt(lambda: type(error).__name__)",
        "sender.send(y(1), FINAL)",
    ]
    if model == "sends":
        both.infer(model, code(*lines))
    else:
        both.stream(model, code(*lines))
    both.log(model)


MANY = {
    "three": ["for i in range(3): sender.send(y(i))", "sender.send(flags=FINAL)"],
    "three, the last one with the flag": ["for i in range(2): sender.send(y(i))", "sender.send(y(2), FINAL)"],
    "none": ["sender.send(flags=FINAL)"],
    "a hundred": ["for i in range(100): sender.send(y(i))", "sender.send(flags=FINAL)"],
    "large ones": ["for i in range(5): sender.send(y(*range(20_000)))", "sender.send(flags=FINAL)"],
    "an error between": ["sender.send(y(1))", "sender.send(failed())", "sender.send(y(2))", "sender.send(flags=FINAL)"],
    "an error at the end": ["sender.send(y(1))", "sender.send(failed('the end'), FINAL)"],
    "from a thread, after execute": [
        "def run():",
        "    for i in range(5): sender.send(y(i))",
        "    sender.send(flags=FINAL)",
        "threading.Thread(target=run).start()",
    ],
    "an exception before any": ["raise ValueError('on purpose')"],
    "an exception after some": ["sender.send(y(1))", "raise ValueError('on purpose')"],
    "an exception after the end": ["sender.send(y(1), FINAL)", "raise ValueError('on purpose')"],
    "a list": ["returned = []"],
    "a response": ["returned = [y(1)]"],
    "a list of None": ["returned = [None]"],
    "a text": ["returned = 'text'"],
    "a text after the end": ["sender.send(y(1), FINAL)", "returned = 'text'"],
}


@pytest.mark.parametrize("name", MANY)
def test_a_decoupled_model_sends_as_many_as_it_likes(both: Both, name: str) -> None:
    both.stream("streams", code(*MANY[name]))


RETURNED_AND_SENT = {
    "returned, and sent later": ["model.kept = sender", "returned = [y(1)]"],
    "a sender whose request was answered": ["attempt(model.kept.send, y(1))", "returned = [y(2)]"],
    "a sender whose request failed": ["model.kept = sender", "raise ValueError('on purpose')"],
    "it is closed": ["attempt(model.kept.send, y(1))", "returned = [y(3)]"],
}


def test_a_request_is_answered_once(both: Both) -> None:
    for lines in RETURNED_AND_SENT.values():
        both.infer("sends", code(*lines))
    both.log("sends")


AWAITS = {
    "without await": ["sender.send(y(1), FINAL)"],
    "after a turn of the loop": ["await asyncio.sleep(0)", "sender.send(y(1), FINAL)"],
    "a task that goes on": [
        "async def later():",
        "    await asyncio.sleep(0.01)",
        "    sender.send(y(1), FINAL)",
        "model.task = asyncio.create_task(later())",
    ],
    "in another thread": ["await asyncio.get_running_loop().run_in_executor(None, sender.send, y(1), FINAL)"],
}


@pytest.mark.parametrize("name", AWAITS)
def test_a_decoupled_coroutine_sends(both: Both, name: str) -> None:
    both.stream("awaits", code(*AWAITS[name]))


AWAITS_ONE = AWAITS | {
    "returns a response": ["await asyncio.sleep(0)", "returned = [y(1)]"],
    "returns nothing in a list": ["sender.send(y(1), FINAL)", "returned = [None]"],
    "raises": ["raise ValueError('on purpose')"],
    "returns a text": ["await asyncio.sleep(0)", "returned = 'text'"],
}


@pytest.mark.parametrize("name", AWAITS_ONE)
def test_a_coroutine_answers_once(both: Both, name: str) -> None:
    both.infer("awaits_one", code(*AWAITS_ONE[name]))


def test_a_coroutine_that_raises_later_fails_its_request(both: Both) -> None:
    inputs = code("await asyncio.sleep(0)", "raise ValueError('on purpose')")
    theirs = both.triton.infer("awaits_one", inputs)
    ours = both.moonpool.infer("awaits_one", inputs)

    assert isinstance(theirs, Failure)
    assert isinstance(ours, Failure)
    # Triton loses all frames but the innermost one.
    assert ours.text.startswith(theirs.text)


def test_a_decoupled_model_needs_a_stream(both: Both) -> None:
    inputs = code("sender.send(y(1), FINAL)")
    theirs = both.triton.infer("streams", inputs)
    ours = both.moonpool.infer("streams", inputs)

    assert theirs == Failure("UNSUPPORTED", "ModelInfer RPC doesn't support models with decoupled transaction policy")
    assert isinstance(ours, Failure)
    assert ours.text.startswith("model 'streams' is decoupled: ")


def test_a_model_that_answers_once_may_be_asked_for_a_stream(both: Both) -> None:
    both.stream("sends", code("returned = [y(1)]"))
    both.stream("sends", code("raise ValueError('on purpose')"))
    both.stream("sends", code("returned = [failed()]"))


@pytest.mark.promise("Fidelity", "A client that leaves is noticed as in a real Triton.")
def test_a_model_finds_out_that_its_client_is_gone(both: Both) -> None:
    lines = [
        "import time",
        "def run():",
        "    attempt(sender.is_cancelled)",
        "    sender.send(y(1))",
        "    end = time.monotonic() + 60",
        "    while not sender.is_cancelled() and time.monotonic() < end: time.sleep(0.01)",
        "    attempt(sender.is_cancelled)",
        "    attempt(request.is_cancelled)",
        "    sender.send(y(2))",
        "    attempt(sender.send, failed('gone', pb_utils.TritonError.CANCELLED), FINAL)",
        "threading.Thread(target=run).start()",
    ]
    both.forget_log()

    both.triton.first_of_stream("streams", code(*lines))
    both.moonpool.first_of_stream("streams", code(*lines))

    assert [line.text for line in both.log_until("None")] == ["False", "True", "True"]
