"""Calls other models, in the way that its input DO names, with its input X.

`{...}` behind the name is JSON with the arguments. Y has the result as numbers, SAID as text.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

KEPT = []


def request(x, model="square", name="X", output="Y", **options):
    inputs = [pb_utils.Tensor(name, x)] if isinstance(x, np.ndarray) else x
    return pb_utils.InferenceRequest(
        model_name=model, inputs=inputs, requested_output_names=[output] if output else [], **options
    )


def y_of(response, output="Y"):
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, output).as_numpy()


def once(x, **options):
    return y_of(request(x, **options).exec(), options.get("output", "Y"))


def often(x, times):
    for i in range(times):
        y = once(x + i)
    return y


def unnamed(x):
    """Ask for no outputs by name."""
    return y_of(request(x, output="").exec())


def error(x, **options):
    response = request(x, **options).exec()
    return f"{response.error().code().name}: {response.error().message()}"


def gathered(x, times, model="square"):
    async def ask():
        asked = [request(x + i, model=model).async_exec() for i in range(times)]
        return [y_of(each) for each in await asyncio.gather(*asked)]

    return np.stack(asyncio.run(ask())).sum(0)


def given_up(x, model):
    """Cancel a coroutine that waits."""

    async def ask():
        waiting = asyncio.ensure_future(request(x, model=model).async_exec())
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        waiting.cancel()
        return y_of(await request(x).async_exec())

    return asyncio.run(ask())


def in_threads(x, threads, times):
    totals = []

    def ask(i):
        totals.append(sum(once(x + i)[0] for _ in range(times)))

    started = [threading.Thread(target=ask, args=(i,)) for i in range(threads)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    return np.array([sum(totals)], np.float32)


def mixed(x, times):
    """Call from threads and coroutines at the same time."""
    sums = [None, None]
    one = threading.Thread(target=lambda: sums.__setitem__(0, in_threads(x, 3, times)))
    other = threading.Thread(target=lambda: sums.__setitem__(1, gathered(x, times)))
    for each in (one, other):
        each.start()
    for each in (one, other):
        each.join()
    return sums[0] + sums[1]


def in_pool(x, processes):
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return np.stack(pool.map(once, [x + i for i in range(processes)])).sum(0)


def _ask_and_put(x, depth, queue):
    if depth:
        process = multiprocessing.get_context("fork").Process(target=_ask_and_put, args=(x, depth - 1, queue))
        process.start()
        process.join()
    queue.put(once(x).tolist())


def in_child(x, depth=0):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_ask_and_put, args=(x, depth, queue))
    child.start()
    answers = [queue.get() for _ in range(depth + 1)]
    child.join()
    return np.array(answers, np.float32).sum(0)


async def awaited(x):
    return y_of(await request(x).async_exec())


def _report(report, x):
    try:
        report.send(error(x, model="nobody"))
        try:
            request(x).exec(decoupled=True)
        except pb_utils.TritonModelException as refused:
            report.send(str(refused))
        report.send(asyncio.run(awaited(x)).tolist())
        report.send(pb_utils.is_model_ready("square"))
        report.send(pb_utils.empty(4, np.float32).shape)
    except Exception as wrong:
        report.send(repr(wrong))
    report.close()


def child_report(x):
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_report, args=(there, x))
    child.start()
    there.close()
    told = []
    while True:
        try:
            told.append(here.recv())
        except EOFError:
            break
    child.join()
    here.close()
    return json.dumps(told)


def dead_child(x):
    """Kill a child while it waits; the stub goes on."""

    def ask():
        request(x, model="slow").exec()

    child = multiprocessing.get_context("fork").Process(target=ask)
    child.start()
    time.sleep(0.05)
    child.kill()
    child.join()
    return once(x)


def recursive(x, depth, timeout=0):
    """Ask this very model to ask itself, and so on; returns the error if that fails."""
    if not depth:
        return x
    do = ["recursive" + json.dumps({"depth": depth - 1, "timeout": timeout})]
    inputs = [pb_utils.Tensor("X", x + 1), pb_utils.Tensor("DO", np.array(do, object))]
    response = request(inputs, model="caller", output="", timeout=timeout).exec()
    if response.has_error():
        return f"{response.error().code().name}: {response.error().message()}"
    said = pb_utils.get_output_tensor_by_name(response, "SAID")
    return y_of(response) if said is None else said.as_numpy()[0].decode()


def iterated(x, model="square"):
    responses = request(x, model=model).exec(decoupled=True)
    first = [y_of(each).tolist() for each in responses]
    again = [y_of(each).tolist() for each in responses]
    return json.dumps([first, again])


def streamed(x, size=4):
    """Read all responses of a model that has many, in one loop, in a second one, and after a break."""
    x = np.full(size, x[0], np.float32)
    responses = request(x, model="stream").exec(decoupled=True)
    seen = []
    for response in responses:
        assert not response.has_error(), response.error().message()
        seen.append([float(t.as_numpy().max()) for t in response.output_tensors()])
        if len(seen) == 2:
            break
    for response in responses:
        seen.append([float(t.as_numpy().max()) for t in response.output_tensors()])
    again = [len(response.output_tensors()) for response in responses]
    return json.dumps([seen, again])


def cancelled(x, by):
    """Leave an endless stream."""
    responses = request(x, model="endless").exec(decoupled=True)
    first = [y_of(next(responses))[0] for _ in range(3)]
    if by == "cancel":
        responses.cancel()
        last = list(responses)[-1]
        said = "ended" if not last.has_error() and not last.output_tensors() else "an error"
    else:
        del responses
        gc.collect()
        said = "forgotten"
    return json.dumps([[float(each) for each in first], said])


def streams(x, count):
    """Read many streams at a time, by threads of coroutines and in turn."""
    iterators = [request(x, model="stream").exec(decoupled=True) for _ in range(count)]
    return np.array([sum(1 for _ in each) for each in iterators], np.float32)


def strings(x):
    words = np.array([[b"", b"a" * 70_000], [b"\xff", "ü".encode()]], object)
    tensor = pb_utils.Tensor("WORDS", words)
    response = request([tensor], model="words", output="OUT_WORDS").exec()
    assert y_of(response, "OUT_WORDS").tolist() == words.tolist()
    # The second time the tensor is passed on as it came, without reading it here.
    again = request([tensor], model="words", output="OUT_WORDS").exec().output_tensors()[0]
    passed = pb_utils.Tensor("WORDS", again.as_numpy())
    response = request([passed], model="words", output="OUT_WORDS").exec()
    return json.dumps([len(word) for word in y_of(response, "OUT_WORDS").ravel()])


def where(x, model="square"):
    """Tell whether inputs and outputs lie in shared memory."""
    from moonpool.ipc.memory import lease_of

    y = once(x, model=model)
    return json.dumps([lease_of(x) is not None, lease_of(y) is not None])


def chained(x, size):
    """Put a reply, an array of ours, and one in shared memory into the next request."""
    big = pb_utils.empty(size, np.float32)
    big[:] = np.arange(size)
    for array in (big, big + 0):
        y = once(array)
        z = once(y)
        np.testing.assert_array_equal(z, y * y)
        np.testing.assert_array_equal(y, array * array)
    return y[:4]


def echoed(x, size):
    """Check that a tensor which another model hands back is the very memory that we gave."""
    big = pb_utils.empty(size, np.float32)
    big[:] = 7
    back = once(big, model="mirror", output="OUT_X")
    back[0] = 8
    first = big[0]
    del big
    gc.collect()
    for _ in range(4):
        pb_utils.empty(size, np.float32)[:] = 0
    assert back[1] == 7
    return np.array([first, back[0]], np.float32)


def keep(x, size, model="square"):
    KEPT.append(once(np.full(size, 3, np.float32), model=model))
    return x


def kept(x):
    values = np.array([each.sum() for each in KEPT], np.float32)
    KEPT.clear()
    return values


def late(x):
    """Call after this batch has been answered."""

    def ask():
        LATE.wait()
        KEPT.append(once(x))
        DONE.set()

    LATE.clear()
    DONE.clear()
    threading.Thread(target=ask).start()
    return x


LATE, DONE = threading.Event(), threading.Event()


def go(x):
    LATE.set()
    DONE.wait()
    return KEPT.pop()


def parameters(x):
    asked = request(
        x,
        model="told",
        output="SAID",
        request_id="id",
        correlation_id=7,
        flags=1,
        timeout=11_000_000_000,
        parameters={"a": 1, "b": "two", "c": True},
    )
    return y_of(asked.exec(), "SAID")[0].decode()


def bad_fields(x):
    said = [error(x, correlation_id="c" * 5000), error(x, model_version=-7)]
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        said.append(error([pb_utils.Tensor("X", x[:1].reshape((1,) * 33))]))
    return json.dumps(said)


def initialized(x):
    return INITIALIZED[0]


def memory(x, times):
    """Return the shared memory that this process maps, in kB, after so many calls."""
    for i in range(times):
        once(x)
    with open("/proc/self/maps") as maps:
        return np.array([sum("moonpool" in line for line in maps)], np.float32)


def pid(x):
    return str(os.getpid())


INITIALIZED = []


class TritonPythonModel:
    def initialize(self, args):
        try:
            request(np.zeros(1, np.float32)).exec()
        except pb_utils.TritonModelException as refused:
            INITIALIZED.append(str(refused))

    def execute(self, requests):
        return [self._answer(each) for each in requests]

    def _answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        do = pb_utils.get_input_tensor_by_name(request, "DO").as_numpy()[0].decode()
        name, brace, rest = do.partition("{")
        answer = globals()[name](x, **json.loads(brace + rest or "{}"))
        if isinstance(answer, str):
            return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([answer], object))])
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer)])
