"""Large JSON is read in pieces, between which others have the interpreter.

What comes out is what one piece would give.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import numpy as np
import orjson
import pytest
from hypothesis import example, given
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.server.http.served import served
from tests.server.http.serving import TIMEOUT_S, Serving

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.memory import lease_of
from moonpool.ipc.tensors import CODES, MAX_DIMS
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.schedule.stream import ResponseStream
from moonpool.runtime.server.http import generate, json_text, routes
from moonpool.runtime.server.http.head import Body
from moonpool.runtime.server.http.inference import HttpInferCall
from moonpool.runtime.server.http.json_text import NotJson, loads, repeated_key
from moonpool.runtime.server.http.turns import LONG_BYTES
from moonpool.runtime.server.inference import tensors
from moonpool.runtime.server.inference.tensors import LongArray, of_values

PROMISE = pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "Large JSON of a request is read in pieces, on a thread, and other clients are answered in between.",
)


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with served("plain") as made:
        yield made


def texts(unit: bytes, size_bytes: int) -> bytes:
    return b"[" + b",".join([unit] * (size_bytes // (len(unit) + 1))) + b"]"


LONG = {
    "numbers": texts(b"7", 4 << 20),
    "rows": texts(b"[1,2,3,4]", 1 << 20),
    "strings": texts(b'"abc"', 3 << 20),
    "one string": b'"%b"' % (b'\\"' * (2 << 20)),
    "objects": texts(b'{"a":1}', 1 << 20),
    "NaN": texts(b"NaN", 2 << 20),
}


def parts_with_turns(read: Callable[[Body], object], text: bytes) -> int:
    """Read a text; return in how many tenths of the thread's own processor time the loop could have had a turn.

    Where a function is called or returns, Python gives the interpreter to a thread that waits for it. If such a thread
    counted its turns, it might be late itself.
    """
    turns: list[float] = []

    def see(*_: object) -> None:
        turns.append(time.thread_time())

    # To look for garbage among a million values, and to drop them, holds the interpreter, too.
    gc.disable()
    begin = time.thread_time()
    sys.setprofile(see)
    try:
        kept = read(text)
    finally:
        sys.setprofile(None)
        end = time.thread_time()
        gc.enable()
    del kept
    return len({int(10 * (at - begin) / (end - begin)) for at in turns if at < end})


@PROMISE
@pytest.mark.parametrize("what", LONG)
def test_the_loop_has_turns_while_a_long_text_is_read(what: str) -> None:
    assert parts_with_turns(loads, LONG[what]) >= 5


@PROMISE
def test_the_loop_has_turns_while_keys_are_compared() -> None:
    assert parts_with_turns(repeated_key, b'{"X":%b}' % LONG["numbers"]) >= 5


@PROMISE
@pytest.mark.parametrize(("path", "module"), [("/v2/models/plain/generate", generate), ("/v2/logging", routes)])
def test_others_are_answered_while_a_route_reads_a_large_body(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, path: str, module: ModuleType
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(text: Body) -> Any:
        begun.set()
        assert goes_on.wait(TIMEOUT_S)
        return loads(text)

    monkeypatch.setattr(module, "loads", slow)
    body = json.dumps({"X": [7] * LONG_BYTES}).encode()
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(serving.post, path, body)
        try:
            assert begun.wait(TIMEOUT_S)
            assert serving.get("/v2/health/live").status == 200
        finally:
            goes_on.set()
        assert large.result(TIMEOUT_S).status == 200


@pytest.mark.promise(
    "HTTP", "The tensors of large JSON are put where the model reads them, and the loop copies none of them."
)
@pytest.mark.parametrize("way", ["infer", "generate"])
def test_tensors_of_large_json_lie_where_the_model_reads_them(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    seen: list[bool] = []
    send = HttpInferCall.send

    def sent(call: HttpInferCall, request: InferenceRequest) -> None:
        seen.extend(lease_of(array) is not None for array in request.arrays)
        send(call, request)

    def stream(scheduler: Any, request: InferenceRequest, timeout_s: None) -> ResponseStream:
        seen.extend(lease_of(array) is not None for array in request.arrays)
        return ResponseStream(scheduler, request, timeout_s)

    monkeypatch.setattr(HttpInferCall, "send", sent)
    monkeypatch.setattr(generate, "ResponseStream", stream)
    values = [7, 8] * (LONG_BYTES // 4)
    described = {"name": "X", "datatype": "UINT8", "shape": [len(values)], "data": values}
    asked = {"inputs": [described]} if way == "infer" else {"X": values}

    reply = serving.post(f"/v2/models/plain/{way}", asked)

    assert seen == [True]
    assert (reply.value["outputs"][0]["data"] if way == "infer" else reply.value["OUT_X"]) == values


@pytest.mark.promise("HTTP", "`generate` takes arrays in an array alike, however many there are.")
@pytest.mark.parametrize(("row", "status"), [([7], 200), ([7, 8], 500)])
def test_generate_takes_arrays_in_an_array_alike_in_any_number(serving: Serving, row: list[int], status: int) -> None:
    few, many = (serving.post("/v2/models/plain/generate", {"X": [row] * rows}) for rows in (2, 80_000))

    assert (few.status, many.status) == (status, status)
    assert status == 200 or many.error == few.error


class Asked:
    """An exchange with what long bodies use of it."""

    def __init__(self, name: str) -> None:
        self.body = name.encode()
        self.is_gone = False
        self.cancel: Callable[[], None] | None = None

    def goes(self) -> None:
        self.is_gone = True
        if self.cancel is not None:
            self.cancel()


def test_long_bodies_are_read_one_at_a_time_and_not_for_clients_that_are_gone() -> None:
    seen: list[bytes] = []
    goes_on = threading.Event()
    loop: asyncio.AbstractEventLoop
    begun: asyncio.Event

    def read(body: Body) -> bytes:
        seen.append(bytes(body))
        loop.call_soon_threadsafe(begun.set)
        assert goes_on.wait(TIMEOUT_S)
        return bytes(body)

    async def main() -> None:
        nonlocal loop, begun
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        with ThreadPoolExecutor(3) as pool:
            long = routes.LongBodies(loop, pool)
            asked: list[Any] = [Asked(name) for name in ("first", "gone", "goes", "last")]
            tasks = [asyncio.create_task(long.read(each, read)) for each in asked]
            await begun.wait()
            asked[1].goes()
            # It waits no longer, while the first one is still read.
            await asyncio.wait(tasks[1:2])
            assert seen == [b"first"]
            goes_on.set()
            assert await tasks[0] == b"first"
            asked[2].goes()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in results] == [bytes, asyncio.CancelledError, asyncio.CancelledError, bytes]
        assert b"gone" not in seen

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


# What comes out

PIECE_BYTES = 64


def in_pieces(read: Callable[[bytes], Any], text: bytes, most_values: int = 3) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_PIECE_BYTES", PIECE_BYTES)
        patch.setattr(json_text, "_SHORT_BYTES", 0)
        patch.setattr(json_text, "_LIST_VALUES", most_values)
        return read(text)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from leaves(each)
    else:
        yield {} if isinstance(value, dict) else value


def same(whole: Any, found: Any) -> bool:
    """Return True for the same value, where a long array has the innermost values, or an object that stands for any."""
    if isinstance(found, LongArray):
        values = [each for part in found.parts for each in part]
        return {} in values if dict in found.types else values == list(leaves(whole))
    if isinstance(whole, list):
        return len(whole) == len(found) and all(map(same, whole, found))
    if isinstance(whole, dict):
        return list(whole) == list(found) and all(same(whole[key], found[key]) for key in whole)
    return type(whole) is type(found) and bool(whole == found)


CHARACTERS = st.sampled_from(list('ab"\\/ä€😀[]{},: \n\x1f'))
STRINGS = st.text(CHARACTERS, max_size=90)
VALUES = st.recursive(
    st.sampled_from([0, 1, -5, 1.5, 1e300, True, False, None, 2**63]) | STRINGS,
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(STRINGS, inner, max_size=6),
    max_leaves=60,
)
CHANGES = st.none() | st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 3),
    st.sampled_from([b"", *b',"[]{}:\\ 1'.split(), b"\\ud83d", b"\xc3", b"null", b",", b"]"]),
)


@given(VALUES, st.booleans(), st.sampled_from([(",", ":"), (" ,\t", "\n: ")]), CHANGES)
@example(["x" * 61, 1], True, (",", ":"), None)
@example(["😀" * 40], True, (",", ":"), None)
@example(["😀" * 40], False, (",", ":"), None)
@example([[]] * 40, True, (",", ":"), (0.5, 0, b","))
def test_a_text_in_pieces_has_the_same_value_or_is_refused(
    value: Any, is_ascii: bool, separators: tuple[str, str], change: tuple[float, int, bytes] | None
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, separators=separators).encode()
    if change is not None:
        share, left_out, added = change
        at = int(share * len(text))
        text = text[:at] + added + text[at + left_out :]
    try:
        whole = orjson.loads(text)
    except orjson.JSONDecodeError:
        with pytest.raises(NotJson):
            in_pieces(loads, text)
    else:
        assert same(whole, in_pieces(loads, text))


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b" " * 200 + b"]",
        b"{" + b" " * 200 + b"}",
        b" " * 200 + b"[1]" + b" " * 200,
        b'{"a"' + b" " * 200 + b":" + b" " * 200 + b"1" + b" " * 200 + b"}",
        b"\xef\xbb\xbf[" + b"1," * 100 + b"1]",
        b'["' + b"\\ud83d\\ude00" * 40 + b'"]',
        b'{"%b":1,"%b":[2]}' % (b"k" * 200, b"\\n" * 200),
    ],
)
def test_odd_texts_are_read(text: bytes) -> None:
    assert same(json.loads(text.decode("utf-8-sig")), in_pieces(loads, text))


@pytest.mark.parametrize(
    "text",
    [
        b" " * 200,
        b"[," + b"1," * 100 + b"1]",
        b"[" + b"1," * 100 + b"]",
        b"[" + b"1," * 100 + b"," + b"1," * 100 + b"1]",
        b"[" + b"1," * 100 + b"1}",
        b"[" + b"1," * 100 + b"1",
        b"[" + b"1," * 100 + b"1] 1",
        b"[%b , , 1]" % texts(b"1", 200),
        b"[%b %b]" % (texts(b"1", 200), texts(b"1", 200)),
        b"[1,\xef\xbb\xbf2," + b"1," * 100 + b"1]",
        b'{"a":%b,}' % texts(b"1", 200),
        b'{"a":%b,1:2}' % texts(b"1", 200),
        b'{"a" %b}' % texts(b"1", 200),
        b'{"a":%b' % texts(b"1", 200),
        b'["' + b"x" * 200,
        b'["' + b"\\ud83d" * 60 + b'"]',
        b'["' + b"\xc3" * 200 + b'"]',
        b'["' + b"x" * 200 + b'\x01"]',
        b"[" * 200 + b"]" * 200,
        b"[" + b"1" * 200 + b"]",
    ],
)
def test_odd_texts_are_refused(text: bytes) -> None:
    with pytest.raises(NotJson):
        in_pieces(loads, text)


class Counted:
    """A pattern that adds up the bytes that it looks at."""

    def __init__(self, pattern: re.Pattern[bytes], seen: list[int]) -> None:
        self._pattern = pattern
        self._seen = seen

    def match(self, part: bytes) -> re.Match[bytes] | None:
        found = self._pattern.match(part)
        self._seen.append(found.end() if found else len(part))
        return found

    def finditer(self, text: bytes, begin: int, end: int) -> Iterator[re.Match[bytes]]:
        at = begin
        try:
            for found in self._pattern.finditer(text, begin, end):
                at = found.end()
                yield found
        finally:
            self._seen.append(at - begin)


def work_for(monkeypatch: pytest.MonkeyPatch, text: bytes) -> int:
    """Return how many bytes and values are looked at while a text is read in pieces."""
    seen: list[int] = []

    def types_in(values: list[Any]) -> set[type]:
        seen.append(len(values))
        return set(map(type, values))

    with monkeypatch.context() as patch:
        for name in ("_ITEMS", "_LAST_ITEM", "_BRACKET_OR_STRING"):
            patch.setattr(json_text, name, Counted(getattr(json_text, name), seen))
        patch.setattr(tensors, "_types_in", types_in)
        patch.setattr(json_text, "_PIECE_BYTES", 1024)
        patch.setattr(json_text, "_LIST_VALUES", 100)
        loads(text)
    return sum(seen)


@PROMISE
@pytest.mark.parametrize(
    "nested",
    [
        b"[" * 60 + b"%b" + b"]" * 60,
        b'{"a":' * 60 + b"%b" + b"}" * 60,
        b'[{"a":' * 30 + b"%b" + b"}]" * 30,
        b"[1," * 60 + b"%b" + b"]" * 60,
        b"[1," * 30 + b"%b" + (b"," + b"1," * 200 + b"1]") * 30,
    ],
)
def test_arrays_in_many_others_are_looked_at_once(monkeypatch: pytest.MonkeyPatch, nested: bytes) -> None:
    inner = texts(b"[]", 4000)
    some = nested.replace(b"%b", inner)
    text = b"[%b]" % b",".join([some] * 4)
    flat = b"[%b]" % b",".join([inner + b",1" * ((len(some) - len(inner)) // 2)] * 4)

    assert work_for(monkeypatch, text) < 4 * work_for(monkeypatch, flat)


@PROMISE
def test_items_in_as_many_levels_as_tensors_have_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (texts(b"[" * levels + b"]" * levels, 8000) for levels in (4, MAX_DIMS))

    assert work_for(monkeypatch, many) < 2 * work_for(monkeypatch, few)


def test_numbers_that_only_triton_has_are_read_in_each_piece() -> None:
    text = texts(b"NaN", 100) + b" "
    found = in_pieces(loads, b"[%b,Infinity,-Infinity,1.5]" % text[1:-2])

    assert str(found.parts) == str([[float("nan")] * 25 + [np.inf, -np.inf, 1.5]])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b'{"a":1,"b":[%b],"c":{"a":1}}', None),
        (b'{"a":1,"b":[%b],"a":2}', "a"),
        (b'{"a":[%b],"b":{"c":1,"c":2}}', "c"),
        (b'{"x":[[{"k":1,"k":1}],%b]}', "k"),
        (b'[{"a":1},{"a":1},%b]', None),
    ],
)
def test_a_key_is_found_to_be_repeated_within_a_piece_and_over_several(text: bytes, key: str | None) -> None:
    assert in_pieces(repeated_key, text % (b"1," * 100 + b"1")) == key


def nested(value: list[Any], levels: int) -> list[Any]:
    for _ in range(levels):
        value = [value]
    return value


TENSORS: list[tuple[str, Any, list[int]]] = [
    ("INT32", list(range(60)), [60]),
    ("INT32", [[1, 2, 3]] * 30, [30, 3]),
    ("FP32", [[[1, 2.5], [3, 4]]] * 20, [20, 2, 2]),
    ("FP64", [list(range(50)), list(range(50))], [2, 50]),
    ("INT32", [[1] * 50, 2, [[3]] * 30, 4], [82]),
    ("BYTES", [["a", "ü" * 60]] * 20, [40]),
    ("INT32", [1] * 60 + [True], [61]),
    ("INT32", [1] * 60 + [{}], [61]),
    ("INT32", [[1] * 50, {"a": [1] * 50}], [51]),
    ("INT32", [1] * 60, [61]),
    ("INT8", [1] * 60 + [300], [61]),
    ("INT32", [[[]]] * 40, [0]),
    ("INT32", nested([1] * 60, MAX_DIMS), [60]),
    ("INT32", nested([1] * 60, MAX_DIMS + 1), [60]),
    ("INT32", nested([1], MAX_DIMS + 30), [1]),
]


@pytest.mark.parametrize(("datatype", "values", "shape"), TENSORS)
def test_a_tensor_of_a_text_in_pieces_is_that_of_the_whole(datatype: str, values: Any, shape: list[int]) -> None:
    def made(data: Any) -> object:
        try:
            found: Any = of_values("X", CODES[datatype], shape, data)
        except MoonpoolError as error:
            return str(error)
        return bytes(found.raw) if datatype == "BYTES" else found.tolist()

    text = json.dumps(values).encode()
    assert made(in_pieces(loads, text)) == made(json.loads(text))
