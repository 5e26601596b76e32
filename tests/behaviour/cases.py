"""Behaviours that are the same wherever a model is hosted. Each case is code for a model, and its value."""

from __future__ import annotations

from typing import Any, NamedTuple

# The code of each asking model begins with this.
PRELUDE = """
import asyncio, json, threading, time

def say(response):
    if response.has_error():
        return f"{response.error().code().name}: {response.error().message()}"
    return [int(each) for tensor in response.output_tensors() for each in tensor.as_numpy().ravel().tolist()]

def text(response):
    return response.error().message() if response.has_error() else say(response)

def all_of(responses):
    return [say(each) for each in responses]

def some_of(responses, count):
    seen = []
    for each in responses:
        seen.append(say(each))
        if len(seen) == count:
            break
    return seen

def stream(*lines):
    return asking("streams", ["Y"], "\\n".join(lines))

def timed(model, seconds=0, **more):
    return asking(model, ["Y"], X=np.array([[seconds]], np.float32), **more)
"""

# These stand in the code of asked models.
COUNT_TO_4 = '"for n in range(4): sender.send(y(n), FINAL if n == 3 else 0)"'
AND_END = '"for n in range(2): sender.send(y(n))", "sender.send(flags=FINAL)"'
# This code sends one response, and the rest when the request is cancelled.
UNTIL_CANCELLED = """
    "sender.send(y(0))",
    "def run():",
    "    while not (sender.is_cancelled() and request.is_cancelled()): threading.Event().wait(0.001)",
    "    {then}",
    "threading.Thread(target=run).start()",
"""
STUBBORN = UNTIL_CANCELLED.format(then="sender.send(y(1)); sender.send(y(2), FINAL)")
POLITE = UNTIL_CANCELLED.format(then="sender.send(failed('gone', pb_utils.TritonError.CANCELLED), FINAL)")
# Four requests with this code wait for each other before they answer.
TOGETHER = """
    "barrier = model.__dict__.setdefault('barrier', threading.Barrier(4))",
    "def run():",
    "    barrier.wait(60)",
    "    sender.send(y(7)); sender.send(flags=FINAL)",
    "threading.Thread(target=run).start()",
"""


class Case(NamedTuple):
    """Code, and the values in its last line, which are JSON."""

    code: str
    values: list[Any]
    # True if Triton 2.51 has the feature and gives the same values.
    is_tritons: bool = True


CASES = {
    "a loop that was left goes on": Case(
        f"i = stream({COUNT_TO_4}).exec(decoupled=True)\nsome_of(i, 1), some_of(i, 2), all_of(i)",
        [[[0]], [[1], [2]], [[3]]],
    ),
    "a loop that was left goes on in the second pass, too": Case(
        f"i = stream({COUNT_TO_4}).exec(decoupled=True)\n"
        "all_of(i), some_of(i, 1), say(next(i)), some_of(i, 1), all_of(i), all_of(i)",
        [[[0], [1], [2], [3]], [[0]], [1], [[2]], [[3]], [[0], [1], [2], [3]]],
    ),
    "next and loops share one place": Case(
        f"i = stream({COUNT_TO_4}).exec(decoupled=True)\n"
        "say(next(i)), some_of(i, 1), say(next(i)), all_of(i), next(i, 'end'), say(next(iter(i)))",
        [[0], [[1]], [2], [[3]], "end", [0]],
    ),
    "a loop that was left after the last response begins anew": Case(
        f"i = stream({COUNT_TO_4}).exec(decoupled=True)\nsome_of(i, 4), some_of(i, 4), all_of(i)",
        [[[0], [1], [2], [3]]] * 3,
    ),
    "an end that is told alone is a response": Case(
        f"i = stream({AND_END}).exec(decoupled=True)\nsome_of(i, 2), all_of(i), all_of(i)",
        [[[0], [1]], [[]], [[0], [1], []]],
    ),
    "a coroutine waits for the first response": Case(
        f"""
async def one():
    return all_of(await stream({TOGETHER}).async_exec(decoupled=True))
async def four():
    return await asyncio.gather(*(one() for _ in range(4)))
asyncio.run(four())""",
        [[[[7], []]] * 4],
    ),
    "a coroutine waits for the end where there is no response": Case(
        """
async def none():
    return all_of(await stream("sender.send(flags=FINAL)").async_exec(decoupled=True))
asyncio.run(none())""",
        [[[]]],
    ),
    "a coroutine whose model is not there": Case(
        """
async def none():
    r = asking("nothing_of_that_name", ["Y"])
    return [each.has_error() for each in await r.async_exec(decoupled=True)]
asyncio.run(none())""",
        [[True]],
    ),
    "a timeout without a policy": Case("timed('timed_alone', 0.01, timeout=5).exec().has_error()", [False]),
    "a timeout that overrides nothing": Case("timed('timed_fixed', 0.01, timeout=5).exec().has_error()", [False]),
    "a timeout that is over before an idle instance has the request": Case(
        "timed('timed', -1).exec()\nr = timed('timed', timeout=1).exec()\ntext(r), say(timed('timed', -1).exec())",
        ["Request timeout expired", []],
    ),
    "a timeout that is not for the model": Case(
        "timed('timed', -1).exec()\nsay(timed('timed', 1.2, timeout=1_000_000).exec())", [[1_000_000]]
    ),
    "two responses of a model that has one": Case(
        "say(asking('sends', ['Y'], 'sender.send(y(1)); sender.send(y(2))').exec())", [[1]], is_tritons=False
    ),
    "a response, and an exception": Case(
        "say(asking('sends', ['Y'], 'sender.send(y(1)); 1 / 0').exec())", [[1]], is_tritons=False
    ),
    "a response, and one that is returned": Case(
        "say(asking('sends', ['Y'], 'sender.send(y(1)); returned = [y(2)]').exec())", [[1]], is_tritons=False
    ),
    "a second send raises in the model": Case(
        """
code = '''sender.send(y(1))
try: sender.send(y(2))
except pb_utils.TritonModelException as error: model.said = str(error)
sender.send(flags=FINAL)'''
said = "returned = [pb_utils.InferenceResponse([pb_utils.Tensor('T', np.array([model.said], object))])]"
say(asking("sends", ["Y"], code).exec()), asking("sends", ["T"], said).exec().output_tensors()[0].as_numpy()[0].decode()""",
        [[1], "Unable to send response. Non-decoupled model cannot send more than one response."],
        is_tritons=False,
    ),
    "a model that was cancelled and goes on": Case(
        f"i = stream({STUBBORN}).exec(decoupled=True)\nsay(next(i)), i.cancel(), all_of(i), i.cancel(), all_of(i)",
        [[0], None, [[1], [2]], None, [[0], [1], [2]]],
        is_tritons=False,
    ),
    "a model that was cancelled and says so": Case(
        f"i = stream({POLITE}).exec(decoupled=True)\nsay(next(i)), i.cancel(), all_of(i)",
        [[0], None, ["CANCELLED: gone"]],
        is_tritons=False,
    ),
    "a model that had sent everything before it was cancelled": Case(
        f"i = stream({COUNT_TO_4}).exec(decoupled=True)\nsay(next(i)), i.cancel(), all_of(i)",
        [[0], None, [[1], [2], [3]]],
        is_tritons=False,
    ),
    "a coroutine cancels": Case(
        f"""
async def ask():
    i = await stream({STUBBORN}).async_exec(decoupled=True)
    return [say(next(i)), i.cancel(), all_of(i)]
asyncio.run(ask())""",
        [[[0], None, [[1], [2]]]],
        is_tritons=False,
    ),
    "a model is cancelled while its request waits": Case(
        """
first = stream("threading.Event().wait(0.5)", "sender.send(flags=FINAL)").exec(decoupled=True)
i = stream("def run():", "    while not sender.is_cancelled(): threading.Event().wait(0.001)",
           "    sender.send(y(5), FINAL)", "threading.Thread(target=run).start()").exec(decoupled=True)
i.cancel(), all_of(i), all_of(first)""",
        [None, [[5]], [[]]],
        is_tritons=False,
    ),
    "a model is cancelled before its first response": Case(
        """
i = stream("def run():", "    while not sender.is_cancelled(): threading.Event().wait(0.001)",
           "    sender.send(y(5), FINAL)", "threading.Thread(target=run).start()").exec(decoupled=True)
i.cancel(), all_of(i)""",
        [None, [[5]]],
        is_tritons=False,
    ),
}
