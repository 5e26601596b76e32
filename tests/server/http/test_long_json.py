"""Answers with many values as JSON are written in pieces, with turns for other clients in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.server.http.served import served
from tests.server.http.serving import Serving

from moonpool.ipc.tensors import BYTES, CODES, encode_bytes
from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.request import WireTensor
from moonpool.runtime.server.http.json_pieces import JsonValues, write

pytestmark = pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "Large outputs as JSON are written in pieces, one answer at a time, and other clients are answered in between.",
)
LONG = ('ab\u00e4\U0001f600\n"' * 60_000).encode()
COUNT = 20_001


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with served("echo", "plain", "text") as made:
        yield made


def binary(inputs: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    described, data = [], b""
    for datatype, array in inputs.items():
        raw = encode_bytes(array) if datatype == "STRING" else array.tobytes()
        kind = "BYTES" if datatype == "STRING" else datatype
        parameters = {"binary_data_size": len(raw)}
        described.append({"name": datatype, "datatype": kind, "shape": [len(array)], "parameters": parameters})
        data += raw
    text = json.dumps({"inputs": described}).encode()
    return text + data, {"Inference-Header-Content-Length": str(len(text))}


def test_all_values_of_all_kinds_come(serving: Serving) -> None:
    numbers = np.linspace(-1, 1, COUNT)
    numbers[7:10] = np.nan, np.inf, -np.inf
    inputs = {
        "FP32": numbers.astype(np.float32),
        "FP64": numbers,
        "INT64": np.arange(COUNT) - 5,
        "UINT8": np.arange(COUNT).astype(np.uint8),
        "BOOL": np.arange(2 * COUNT) % 3 == 0,
        "STRING": np.array([b"", b"null", LONG, b"x", LONG[:150_000]] + [b"yz"] * COUNT, object),
    }
    reply = serving.post("/v2/models/echo/infer", *binary(inputs))

    assert reply.status == 200
    got = {each["name"]: each for each in reply.value["outputs"]}
    for name, array in inputs.items():
        output = got[f"OUT_{name}"]
        assert output["shape"] == [len(array)]
        if name == "STRING":
            assert [text.encode() for text in output["data"]] == array.tolist()
        else:
            np.testing.assert_array_equal(np.array(output["data"], array.dtype), array)


def test_generate_writes_in_the_same_way(serving: Serving) -> None:
    values = [number % 256 for number in range(2 * COUNT)]
    assert serving.post("/v2/models/plain/generate", {"X": values}).value["OUT_X"] == values
    text = LONG.decode()
    assert serving.post("/v2/models/text/generate", {"X": text}).value["OUT_X"] == text


@pytest.mark.parametrize("strings", [[b"ok", LONG + b"\xff"], [b"\xff"] * COUNT, [LONG[:-3] + b"\xf0"]])
def test_a_string_that_is_no_utf8_is_refused(serving: Serving, strings: list[bytes]) -> None:
    body, headers = binary({"STRING": np.array(strings, object)})
    reply = serving.post("/v2/models/echo/infer", body, headers)
    assert (reply.status, "not UTF-8" in reply.error) == (400, True)


class Exchange:
    """Stands for an exchange, with the attributes that `write` needs."""

    def __init__(self, writing: asyncio.Lock) -> None:
        self.writing = writing
        self.is_gone = False


def floats(count: int) -> JsonValues:
    return JsonValues("Y", WireTensor(CODES["FP32"], (count,), np.full(count, 0.1, np.float32)))


def test_others_have_turns_and_one_answer_is_written_at_a_time() -> None:
    async def main() -> None:
        writing = asyncio.Lock()
        turns = 0
        order: list[str] = []

        async def others() -> None:
            nonlocal turns
            while len(order) < 2:
                turns += 1
                await asyncio.sleep(0)

        async def answer(name: str, count: int) -> list[bytes]:
            exchange: Any = Exchange(writing)
            written = await write(exchange, {"data": floats(count)}, 64 << 20)
            order.append(name)
            return written

        first, second, _ = await asyncio.gather(answer("first", 200_000), answer("second", 20_000), others())
        assert order == ["first", "second"]
        assert max(map(len, first)) < 200 << 10
        assert turns >= len(first) + len(second) - 2
        assert len(json.loads(b"".join(first))["data"]) == 200_000

        gone: Any = Exchange(writing)
        gone.is_gone = True
        assert await write(gone, {"data": floats(200_000)}, 64 << 20) == []

    asyncio.run(asyncio.wait_for(main(), 60.0))


@pytest.mark.parametrize("raw", [b"\x05\0\0\0abc" + bytes(40_000), b"\x01\0\0\0a" + bytes(40_000), b""])
def test_bytes_that_are_no_strings_are_an_error_of_the_model(raw: bytes) -> None:
    values = JsonValues("Y", WireTensor(BYTES, (2,), np.frombuffer(raw, np.uint8)))
    with pytest.raises(ModelError, match="output 'Y'"):
        list(values.pieces())
