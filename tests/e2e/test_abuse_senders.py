"""Tests of everything wrong that a decoupled model can do with requests and senders: each stream comes to its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.e2e.hosting import MODELS, Config, hosted, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.waiting import wait_until

import moonpool
from moonpool import ModelError, StubDied

CONFIG: Config = {
    "input": [tensor("CODE", "STRING", -1)],
    "output": [tensor("SAID", "STRING", -1)],
    "model_transaction_policy": {"decoupled": True},
}
# Statements run first; `execute` then returns `result`.
SENDER = "result = None; s = request.get_response_sender()\n"
FINE = SENDER + "s.send(said('fine'), 1)"
DROPPED = "the model ended without a last response to this request"
CLOSED = "Unable to send response. Response sender has been closed."


@pytest.fixture(scope="module")
def wrong(runtime: moonpool.Runtime) -> Iterator[None]:
    with hosted(runtime, "wrong", MODELS / "wrong.py", CONFIG):
        yield


def take(stream: moonpool.ResponseStream) -> list[str]:
    """Return the text of each response or error."""
    taken = []
    while True:
        try:
            taken.append(next(stream).outputs["SAID"][0].decode())
        except StopIteration:
            return taken
        except (ModelError, StubDied) as error:
            taken.append(str(error))


def do(runtime: moonpool.Runtime, code: str, timeout_s: float = 60.0) -> list[str]:
    return take(runtime.stream("wrong", {"CODE": [code]}, timeout_s=timeout_s))


def pid(runtime: moonpool.Runtime) -> object:
    return runtime.instances("wrong")[0]["pid"]


# The code of the model, and parts of the responses that it makes.
CASES: dict[str, list[str]] = {
    "s.send(flags=1)": [],
    "s.send(said('a')); request.get_response_sender().send(said('b'), 1)": ["a", "b"],
    # Used wrongly
    "s.send(flags=1); s.send(said('late'))": [],
    "s.send(said('all'), 1); raise ValueError('after all')": ["all"],
    "s.send(said('one')); raise ValueError('after one')": ["one", "ValueError: after one"],
    "s.send('x')": ["TypeError: send(): incompatible function arguments"],
    "s.send(said('x'), None)": ["TypeError: send(): incompatible function arguments"],
    "s.send(said('x'), 'x')": ["TypeError: send(): incompatible function arguments"],
    "s.send(said('x'), 7)": ["Unable to send response. Unsupported flag provided."],
    "s.send(said('x'), 2**70)": ["TypeError: send(): incompatible function arguments"],
    "s.send(None, 0)": ["Inference Response object must be provided"],
    "s.send(R.__new__(R)); s.send(said('after'), 1)": ["the response cannot be sent", "after"],
    "r = said('x'); s.send(r); r.output_tensors().append(None); s.send(r, 1)": ["x", "x"],
    "r = said('x'); [s.send(r) for _ in range(3)]; s.send(flags=1)": ["x", "x", "x"],
    "type(s)()": ["TypeError: c_python_backend_utils.InferenceResponseSender: No constructor defined!"],
    "import copy; copy.copy(request)": ["TypeError: cannot pickle"],
    "import copy; copy.deepcopy(request)": ["TypeError: cannot pickle"],
    "import pickle; pickle.dumps(request)": ["TypeError: cannot pickle"],
    "import pickle; pickle.dumps(s)": ["TypeError: cannot pickle"],
    "s.send(said('x' * 10)); s._reply = None; request._reply = None; del s": ["xxxxxxxxxx", DROPPED],
    "result = [said('x')]": ["execute function must return None."],
    # Lost
    "s = None": [DROPPED],
    "c = [s]; c.append(c)": [DROPPED],
    "e = ValueError(); e.cycle = (e, s)": [DROPPED],
    "class D:\n def __del__(self): self.s.send(said('last words'), 1)\n"
    "d = D(); d.s = s; s = None; del d": ["last words"],
    "class D:\n def __del__(self): raise SystemExit\nd = D(); d.s = s": [DROPPED],
    "class D:\n def __del__(self): KEPT['revived'] = self.s\nd = D(); d.s = s; s = d = None\n"
    "gc.collect(); KEPT.pop('revived').send(said('revived'), 1)": ["revived"],
    # In other places
    "t = threading.Thread(target=lambda: s.send(said('thread'), 1)); t.start(); t.join()": ["thread"],
    "t = threading.Timer(0.01, lambda: s.send(said('later'), 1)); t.start()": ["later"],
    "threading.Timer(0.01, lambda s=s: sys.exit(3)).start(); s = None": [DROPPED],
    "threading.Timer(0.01, lambda s=s: 1 / 0).start(); s = None": [DROPPED],
    "KEPT['request'] = request; s.send(flags=1)": [],
    "s.send(said(KEPT['request'].inputs()[0].as_numpy()[0].decode()[:9]), 1)": ["result = "],
    "KEPT.pop('request').get_response_sender().send(said('x'))": [CLOSED],
    # Forks
    "p = os.fork()\nif p == 0: os._exit(0)\nos.waitpid(p, 0); s.send(said('parent'), 1)": ["parent"],
    "p = os.fork()\nif p == 0:\n try: s.send(said('child'), 1)\n finally: os._exit(0)\n"
    "os.waitpid(p, 0); s.send(said('parent'), 1)": ["parent"],
    "p = os.fork()\nif p: os.waitpid(p, 0); s.send(said('parent'), 1)": ["parent"],
    # Coroutines
    "async def f(): s.send(said('async'), 1)\nresult = f()": ["async"],
    "async def f(): return 3\nresult = f()": ["execute function must return None."],
    "async def f(): raise SystemExit(3)\nresult = f()": ["SystemExit: 3"],
    "async def f(): raise KeyboardInterrupt\nresult = f()": ["KeyboardInterrupt"],
    "async def f(): raise GeneratorExit\nresult = f()": ["GeneratorExit"],
    "async def f(): raise StopIteration\nresult = f()": ["coroutine raised StopIteration"],
    "import asyncio\nasync def f(): raise asyncio.CancelledError\nresult = f()": ["CancelledError"],
    "import asyncio\nasync def f():\n asyncio.current_task().cancel()\n await asyncio.sleep(9)\n"
    "result = f()": ["CancelledError"],
    "import asyncio\nasync def f(): asyncio.get_running_loop().stop()\nresult = f(); s = None": [DROPPED],
    "import asyncio\nasync def f(): asyncio.get_running_loop().close()\nresult = f()": ["RuntimeError"],
    "import asyncio\nasync def f(): [t.cancel() for t in asyncio.all_tasks()]\nresult = f(); s = None": [
        DROPPED
    ],
    "async def f(): s.send(said('async again'), 1)\nresult = f()": ["async again"],
}  # fmt: skip


@pytest.mark.promise(
    "Abuse",
    "A stream ends whatever the model does with its sender: used wrongly, lost, in a cycle, in "
    "a destructor, in a fork, in a dead thread.",
)
@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize(
    "code",
    [pytest.param(code, marks=pytest.mark.needs("processes")) if "os.fork" in code else code for code in CASES],
    ids=range(len(CASES)),
)
def test_every_stream_ends_and_the_process_lives(runtime: moonpool.Runtime, code: str) -> None:
    before = pid(runtime)

    taken = do(runtime, SENDER + code)

    assert len(taken) == len(CASES[code]), taken
    for piece, response in zip(CASES[code], taken, strict=True):
        assert piece in response
    assert do(runtime, FINE) == ["fine"]
    assert pid(runtime) == before


# Sends until it is sent. A handler raises in the middle of that, once.
INTERRUPTED = """
import signal
def handle(_, frame):
    while frame is not None and frame.f_code.co_name != 'send':
        frame = frame.f_back
    if frame is not None:
        raise TimeoutError
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, {after_s})
while s is not None:
    try:
        s.send(said('once'), 1)
        s = None
    except TimeoutError:
        print('interrupted')
    except Exception as error:
        assert 'has been closed' in str(error)
        s = None
signal.setitimer(signal.ITIMER_REAL, 0)
"""


@pytest.mark.promise("Responses at any time", "A signal handler of a model may raise at any point of `send`: …")
@pytest.mark.usefixtures("wrong")
def test_a_send_that_a_handler_interrupts_is_made_once(
    runtime: moonpool.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "moonpool.stub")
    for number in range(1, 200):
        after_s = f"{number * 2e-6:.6f}"
        assert do(runtime, SENDER + INTERRUPTED.format(after_s=after_s)) == ["once"]
    wait_until(lambda: "interrupted" in caplog.text)


@pytest.mark.usefixtures("wrong")
def test_many_threads_send_to_one_request_and_one_of_them_ends_it(runtime: moonpool.Runtime) -> None:
    code = """
def run(number):
    for _ in range(20):
        s.send(said(str(number)))
    try:
        s.send(said("end"), 1)
        KEPT["ended"].append(number)
    except pb_utils.TritonModelException as error:
        KEPT["refused"].append(str(error))
def safe(number):
    try: run(number)
    except pb_utils.TritonModelException as error: KEPT["refused"].append(str(error))
KEPT["ended"], KEPT["refused"] = [], []
threads = [threading.Thread(target=safe, args=(i,)) for i in range(16)]
for t in threads: t.start()
for t in threads: t.join()
"""
    taken = do(runtime, SENDER + code)
    assert taken.count("end") == 1
    assert taken[-1] == "end"
    told = do(runtime, SENDER + 's.send(said(f\'{len(KEPT["ended"])} {set(KEPT["refused"])}\'), 1)')
    assert told == ["1 {'" + CLOSED + "'}"]


@pytest.mark.promise("Abuse", "A stream ends whatever the model …")
@pytest.mark.usefixtures("wrong")
def test_thousands_of_senders_stay_open_and_are_ended_in_any_order(runtime: moonpool.Runtime) -> None:
    keep = SENDER + "KEPT.setdefault('open', []).append(s); s.send(said('open'))"
    patience_s = 150.0  # for all of them, on a busy machine
    streams = [runtime.stream("wrong", {"CODE": [keep]}, timeout_s=patience_s) for _ in range(2100)]
    end = (
        "result = None\nfor i, s in enumerate(reversed(KEPT.pop('open'))):\n"
        " if i % 3 == 0: s.send(said('end'), 1)\n elif i % 3 == 1: s.send(flags=1)\n"
        "s = request.get_response_sender(); s.send(flags=1)"
    )
    assert do(runtime, end, patience_s) == []

    ends = [take(stream)[1:] for stream in streams]

    assert ends.count([]) == ends.count(["end"]) == 700
    assert sum(len(each) == 1 and DROPPED in each[0] for each in ends) == 700
    assert do(runtime, FINE) == ["fine"]


@pytest.mark.promise("Abuse", "When a process dies or a model is unloaded, all its open streams end.")
@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("os._exit(3)", "exited with 3"),
        ("threading.Thread(target=lambda: os._exit(4)).start()", "exited with 4"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("os.closerange(3, 1000)", "Stub process"),
    ],
)
@pytest.mark.usefixtures("wrong")
def test_a_process_that_dies_ends_all_its_open_streams(runtime: moonpool.Runtime, death: str, words: str) -> None:
    keep = SENDER + "KEPT.setdefault('open', []).append(s); s.send(said('open'))"
    streams = [runtime.stream("wrong", {"CODE": [keep]}, timeout_s=60.0) for _ in range(20)]
    for stream in streams:
        assert next(stream).outputs["SAID"][0] == b"open"

    last = do(runtime, SENDER + "KEPT['last'] = s\n" + death)

    for taken in (last, *map(take, streams)):
        assert len(taken) == 1
        assert words in taken[0]
    assert do(runtime, FINE) == ["fine"]


@pytest.mark.promise("Abuse", "When a process dies or …")
def test_unloading_ends_streams_that_the_model_would_not_end() -> None:
    with moonpool.Runtime(drain_timeout_s=0.2) as other:
        other.load("wrong", MODELS / "wrong.py", config=CONFIG)
        keep = SENDER + "KEPT.setdefault('open', []).append(s)"
        streams = [other.stream("wrong", {"CODE": [keep]}, timeout_s=60.0) for _ in range(20)]
        ends: list[list[str]] = []
        threads = [threading.Thread(target=lambda s=s: ends.append(take_any(s))) for s in streams]
        for thread in threads:
            thread.start()
        other.unload("wrong")
        for thread in threads:
            thread.join(60)

    assert len(ends) == 20
    assert all(len(end) == 1 for end in ends)


def take_any(stream: moonpool.ResponseStream) -> list[str]:
    try:
        return take(stream)
    except moonpool.MoonpoolError as error:
        return [str(error)]
