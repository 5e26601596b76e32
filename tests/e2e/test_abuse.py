"""Tests of models that do everything wrong with tensors and responses: no process dies, and no caller waits in vain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.hosting import MODELS, Config, hosted, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401

import moonpool
from moonpool import ModelError

CONFIG: Config = {"input": [tensor("CODE", "STRING", -1)], "output": [tensor("SAID", "STRING", -1)]}
FINE = "[said('fine')]"


@pytest.fixture(scope="module")
def wrong(runtime: moonpool.Runtime) -> Iterator[None]:
    with hosted(runtime, "wrong", MODELS / "wrong.py", CONFIG):
        yield


def do(runtime: moonpool.Runtime, code: str) -> Any:
    return runtime.infer("wrong", {"CODE": [code]}, timeout_s=60.0)["SAID"][0].decode()


def pid(runtime: moonpool.Runtime) -> object:
    return runtime.instances("wrong")[0]["pid"]


# The value that the model returns, and a part of the client's error.
RETURNS: dict[str, str] = {
    "[R([], E.__new__(E))]": "the response cannot be sent: AttributeError",
    "[R.__new__(R)]": "the response cannot be sent: AttributeError",
    "[R([T.__new__(T)])]": "the response cannot be sent: AttributeError",
    "[R([type('T', (T,), {'__init__': lambda *a: None})('SAID', text)])]": "cannot be sent",
    "[T.__new__(T)]": "Expected an 'InferenceResponse' object in the execute function return list",
    "[R([T('SAID', text)] * 3)]": "output 'SAID' is given twice",
    "[R([T('SAID', text) for _ in range(10_000)])]": "output 'SAID' is given twice",
    "t = T('SAID', np.arange(9)); t.as_numpy().resize((0,), refcheck=False); result = [R([t])]": (
        "of shape [9] has 0 bytes: its array was resized after the tensor was made"
    ),
    "t = T('SAID', np.arange(9)); t.as_numpy().resize((10**6,), refcheck=False); result = [R([t])]": (
        "of shape [9] has 8000000 bytes: its array was resized after the tensor was made"
    ),
    "[R([T('SAID', np.broadcast_to(np.zeros(1), (2**45,)))])]": "Unable to allocate",
    "[R([T('SAID', np.zeros((1,) * 40))])]": "has 40 dimensions, and 32 is the most",
    "[R([T('SAID', text)], None, {'k': 2**70})]": "the parameters of the response",
    "[R([T('SAID', text)], None, {'k': '\\ud800'})]": "the parameters of the response",
    "[R([T('SAID', text)], None, {str(i): i for i in range(10_000)})]": "4096 is the most",
    "[R([], E('\\ud800'))]": "a text that has no UTF-8 form",
    "[R([], E('long' * 10**7))]": "longlong",
    "type('L', (list,), {'__len__': lambda s: 1, '__iter__': lambda s: iter(())})()": (
        "InferenceResponse(s) size is:0"
    ),
    "type('L', (list,), {'__iter__': lambda s: 1 / 0})([R()])": "ZeroDivisionError",
    "requests.append(request); result = [R(), R()]": "InferenceResponse(s) size is:2",
    "(x for x in [R()])": "Expected a list in the execute return, found type '<class 'generator'>'",
    "{0: R()}": "Expected a list in the execute return, found type '<class 'dict'>'",
    # Exceptions whose text cannot be made.
    "sys.exit(3)": "SystemExit: 3",
    "raise GeneratorExit": "GeneratorExit",
    "raise StopIteration": "StopIteration",
    "raise MemoryError": "MemoryError",
    "class E(Exception):\n def __str__(self): raise SystemExit\nraise E": "E: <MESSAGE UNAVAILABLE",
    "class E(Exception):\n def __str__(self): return '\\ud800'\nraise E": r"E: \ud800",
    "class E(BaseException):\n def __str__(self): return 3\nraise E": "E: <MESSAGE UNAVAILABLE",
    "class M(type):\n def __getattribute__(s, n): raise ValueError\n"
    "class E(Exception, metaclass=M): pass\nraise E": "E: <EMPTY MESSAGE>",
    "e = ValueError('itself'); e.__cause__ = e; raise e": "ValueError: itself",
    "e = ValueError('long' * 10**7); raise e": "more characters)",
    "def f(): f()\nf()": "RecursionError",
}


@pytest.mark.promise("Abuse", "If a value that a model returns cannot be sent, its request gets an error.")
@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize("code", RETURNS, ids=range(len(RETURNS)))
def test_a_value_that_cannot_be_sent_is_an_error_of_its_request(runtime: moonpool.Runtime, code: str) -> None:
    before = pid(runtime)

    with pytest.raises(ModelError) as caught:
        do(runtime, code)

    assert RETURNS[code] in str(caught.value)
    assert do(runtime, FINE) == "fine"
    assert pid(runtime) == before


# Odd values that do no harm.
ODD: dict[str, str] = {
    "r = said('ok'); r.output_tensors().append(None); result = [r]": "ok",
    "[R([T(f'N{i}', np.zeros(1)) for i in range(10_000)] + [T('SAID', text)])]": "ok",
    "[R([T('\\ud800', np.zeros(1)), T('SAID', text)])]": "ok",
    "requests.clear(); result = [said('ok')]": "ok",
    "request._inputs.clear(); result = [said('ok')]": "ok",
    "request.inputs().clear(); result = [said(str(len(request.inputs())))]": "1",
    "[type('T', (R,), {'has_error': lambda s: 1 / 0, 'output_tensors': lambda s: 1 / 0})(said('ok')"
    ".output_tensors())]": "ok",
    "[R([type('T', (T,), {'as_numpy': lambda s: 1 / 0})('SAID', text)])]": "ok",
    "a = text.copy(); t = T('SAID', a); a[0] = object(); result = [R([t])]": "ok",
    "KEPT['self'] = KEPT; request.me = 1": "",
    "r = said('ok'); KEPT['r'] = r; result = [r]": "ok",
    "result = [KEPT.pop('r')]": "ok",
    "c = []; c.append((c, request, T('X', np.zeros(9)))); del c; gc.collect(); result = [said('ok')]": "ok",
    "[R([T('SAID', text)], None, {type('S', (str,), {})('k'): type('I', (int,), {})(3)})]": "ok",
}


@pytest.mark.usefixtures("wrong")
def test_odd_values_do_no_harm(runtime: moonpool.Runtime) -> None:
    before = pid(runtime)
    for code, expected in ODD.items():
        if not expected:
            with pytest.raises(ModelError, match="AttributeError"):
                do(runtime, code)
        else:
            assert do(runtime, code) == expected
    assert do(runtime, FINE) == "fine"
    assert pid(runtime) == before
