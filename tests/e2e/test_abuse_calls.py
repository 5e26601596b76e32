"""Tests of everything wrong that a model can do with requests to other models: each call ends, and no process dies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.hosting import MODELS, Config, hosted, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401

import moonpool
from moonpool import ModelError

CONFIG: Config = {"input": [tensor("CODE", "STRING", -1)], "output": [tensor("SAID", "STRING", -1)]}
STREAMS: Config = {"model_transaction_policy": {"decoupled": True}}
# This code asks another model to run a piece of code.
ASK = """
def make(code="[said('other')]", model="other", **more):
    t = T("CODE", np.array([code.encode()], np.object_))
    return Q(inputs=[t], requested_output_names=["SAID"], model_name=model, **more)
def ask(*a, **k): return make(*a, **k).exec()
def text_of(r):
    if r.has_error(): return r.error().message()
    return r.output_tensors()[0].as_numpy()[0].decode() if r.output_tensors() else "end"
def attempt(f):
    try: return str(f())
    except Exception as e: return f"{type(e).__name__}: {e}"
stream = "s = request.get_response_sender(); [s.send(said(str(i))) for i in range(3)]; s.send(flags=1); result = None"
forever = "KEPT['s'] = request.get_response_sender(); result = None"
"""


@pytest.fixture(scope="module", autouse=True)
def models(runtime: moonpool.Runtime) -> Iterator[None]:
    with (
        hosted(runtime, "wrong", MODELS / "wrong.py", CONFIG),
        hosted(runtime, "other", MODELS / "wrong.py", CONFIG),
        hosted(runtime, "streams", MODELS / "wrong.py", CONFIG | STREAMS),
    ):
        yield
        # The model keeps senders, and an unload would wait for them.
        do(runtime, "list(make('KEPT.clear()', 'streams').exec(True)); result = [said('done')]")


def do(runtime: moonpool.Runtime, code: str) -> str:
    response = runtime.infer("wrong", {"CODE": [ASK + code]}, timeout_s=60.0)
    text: Any = response["SAID"][0]
    return str(text.decode())


def pids(runtime: moonpool.Runtime) -> list[object]:
    return [runtime.instances(name)[0]["pid"] for name in ("wrong", "other", "streams")]


# The code of the model, and a part of its answer.
CASES: dict[str, str] = {
    "result = [said(text_of(ask()))]": "other",
    # The other model's response is used as its own, and a tensor of its request as the other's.
    "result = [ask()]": "other",
    "result = [R(ask().output_tensors() * 1)]": "other",
    "r = ask(); KEPT['r'] = r; result = [r]": "other",
    "result = [KEPT.pop('r')]": "other",
    # Wrong requests
    "result = [said(text_of(ask(model='nobody')))]": "'nobody'",
    "result = [said(text_of(ask(model='')))]": "''",
    "result = [said(text_of(ask(model='x' * 10_000)))]": "x",
    "result = [said(text_of(ask(model_version=77)))]": "other",
    "result = [said(text_of(Q(inputs=[], requested_output_names=['SAID'], model_name='other').exec()))]": "input",
    "t = T('CODE', np.zeros(3))\n"
    "result = [said(text_of(Q(inputs=[t], requested_output_names=[], model_name='other').exec()))]": "CODE",
    "t = T.__new__(T)\nresult = [said(attempt(lambda: Q(inputs=[t], requested_output_names=[],"
    " model_name='other').exec().error().message()))]": "",
    "q = Q.__new__(Q); result = [said(attempt(q.exec))]": "Error",
    "q = make(); q._inputs.append(None); result = [said(attempt(lambda: text_of(q.exec())))]": "",
    "q = make(); q._inputs.clear(); result = [said(text_of(q.exec()))]": "input",
    "result = [said(attempt(lambda: make().exec(3, 4)))]": "TypeError",
    "result = [said(attempt(lambda: make(parameters={'k': 2**70}).exec().error().message()))]": "",
    "result = [said(attempt(lambda: text_of(request.exec())))]": "",
    # Behaviour of the other model
    "result = [said(text_of(ask('1 / 0')))]": "ZeroDivisionError",
    "result = [said(text_of(ask('[R.__new__(R)]')))]": "the response cannot be sent",
    "result = [said(text_of(ask('[R([], E(\"\", E.CANCELLED))]')) or 'empty')]": "empty",
    "result = [said(text_of(ask('None')))]": "without a last response",
    "result = [said(str(len(text_of(ask(\"[said('x' * 3_000_000)]\")))))]": "3000000",
    # Streams
    "result = [said(','.join(map(text_of, make(stream, 'streams').exec(decoupled=True))))]": "0,1,2",
    "it = make(stream, 'streams').exec(decoupled=True); next(it)\n"
    "result = [said(','.join(map(text_of, it)) + ',' + ','.join(map(text_of, it)))]": "0,1,2",
    "it = make(stream, 'streams').exec(True); KEPT['it'] = it; next(it); result = [said('kept')]": "kept",
    "it = KEPT.pop('it'); result = [said(','.join(map(text_of, it)))]": "1,2,end",
    "it = make(forever, 'streams').exec(True); it.cancel(); it.cancel(); del it; result = [said('left')]": "left",
    "it = make(forever, 'streams').exec(True); c = [it]; c.append(c); del it, c; gc.collect()\n"
    "result = [said('lost')]": "lost",
    "its = [make(forever, 'streams').exec(True) for _ in range(300)]; del its; result = [said('many')]": "many",
    "result = [said(text_of(ask(stream, 'streams')))]": "decoupled",
    "result = [said(attempt(lambda: type(make(stream, 'streams').exec(True))()))]": "ResponseIterator",
    # In other places and at odd times
    "class D:\n def __del__(self): KEPT['d'] = text_of(ask())\nd = D(); del d; result = [said(KEPT.pop('d'))]": "other",
    "class D:\n def __del__(self): KEPT['d'] = text_of(ask())\nd = D(); d.d = d; del d; gc.collect()\n"
    "result = [said(KEPT.pop('d'))]": "other",
    "found = []\nthreads = [threading.Thread(target=lambda: found.append(text_of(ask()))) for _ in range(40)]\n"
    "for t in threads: t.start()\nfor t in threads: t.join()\nresult = [said(f'{len(found)} {set(found)}')]": "40 {'other'}",
    "q = make(); found = []\n"
    "threads = [threading.Thread(target=lambda: found.append(text_of(q.exec()))) for _ in range(20)]\n"
    "for t in threads: t.start()\nfor t in threads: t.join()\nresult = [said(f'{len(found)} {set(found)}')]": "20 {'other'}",
    "threading.Thread(target=lambda: KEPT.update(late=text_of(ask(\"(threading.Event().wait(0.1), "
    "[said('late')])[1]\")))).start()\n"
    "result = [said('first')]": "first",
    "import time\nwhile 'late' not in KEPT: time.sleep(0.01)\nresult = [said(KEPT.pop('late'))]": "late",
    "def stop(): ask('(threading.Event().wait(0.05), [said(1)])[1]'); sys.exit(3)\n"
    "t = threading.Thread(target=stop); t.start(); t.join(); result = [said('ended')]": "ended",
    "import asyncio\nasync def f(): return [said(text_of(await make().async_exec()))]\nresult = f()": "other",
    "import asyncio\nasync def f():\n task = asyncio.ensure_future(make('(threading.Event().wait(0.1), "
    "[said(1)])[1]').async_exec())\n"
    " await asyncio.sleep(0)\n task.cancel()\n return [said('cancelled')]\nresult = f()": "cancelled",
    "import asyncio\nasync def f():\n return [said(str(len(await asyncio.gather(*(make().async_exec() for _ in "
    "range(100))))))]\n"
    "result = f()": "100",
    "async def f(): make().async_exec(); return [said('not awaited')]\nresult = f()": "not awaited",
    "result = [said(attempt(lambda: make().async_exec()))]": "Error",
    # Control of models
    "result = [said(attempt(lambda: pb_utils.load_model('nobody')))]": "nobody",
    "result = [said(str(pb_utils.is_model_ready('wrong')))]": "True",
    "result = [said(str(pb_utils.is_model_ready('nobody')))]": "False",
    "result = [said(attempt(lambda: pb_utils.unload_model('nobody')))]": "",
}  # fmt: skip


@pytest.mark.promise("Abuse", "A request to another model ends whatever either model does.")
@pytest.mark.parametrize("code", CASES, ids=range(len(CASES)))
def test_every_call_ends_and_the_processes_live(runtime: moonpool.Runtime, code: str) -> None:
    before = pids(runtime)

    try:
        said = do(runtime, code)
    except ModelError as error:
        said = str(error)

    assert CASES[code] in said
    assert do(runtime, "result = [said('fine')]") == "fine"
    assert do(runtime, "result = [ask()]") == "other"
    assert pids(runtime) == before
