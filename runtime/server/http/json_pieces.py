"""Writes JSON with many values in pieces of some 100 KB, so that other clients have their turn in between.

Theory of operation. A request of 80 bytes may ask for an answer of millions of values as JSON. Written at once, its
text would hold the loop, and the interpreter's lock, for seconds. So all outputs beyond `SHORT_BYTES` stand in the
document as `JsonValues`, and `write` makes their text piece by piece, with a pass of the loop after each. One answer of
a port is written at a time, which bounds what is made meanwhile. The bound on JSON counts the text: a number of four
bytes may take twenty. Answers are whole before they are sent, as a string that JSON cannot hold changes the status.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from moonpool.ipc.tensors import BYTES, DTYPES, LENGTH_BYTES
from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.request import WireTensor
from moonpool.runtime.server.http.connection import HttpExchange
from moonpool.runtime.server.http.json_text import check_values, dumps
from moonpool.runtime.server.inference.tensors import check_in_json, no_utf8, texts_of, to_bytes, to_values

SHORT_BYTES = 32 << 10
"""Outputs of so many bytes are written at once."""
_PIECE_BYTES = 100 << 10
# Their text takes some 100 KB.
_PIECE_VALUES = 4096


class JsonValues:
    """The values of an output in a document."""

    def __init__(self, name: str, output: WireTensor, *, is_flat: bool = False) -> None:
        """`is_flat`: a single value stands without brackets. Raises `ModelError` for values that JSON cannot hold."""
        check_in_json(name, output)
        self._name = name
        self._output = output
        self._is_bare = is_flat and prod(output.shape) == 1

    def pieces(self) -> Iterator[bytes]:
        """Make the text. Raises `ModelError` for strings that JSON cannot hold."""
        if not self._is_bare:
            yield b"["
        yield from self._strings() if self._output.datatype == BYTES else self._numbers()
        if not self._is_bare:
            yield b"]"

    def _numbers(self) -> Iterator[bytes]:
        values = np.frombuffer(to_bytes(self._output), DTYPES[self._output.datatype])
        for begin in range(0, len(values), _PIECE_VALUES):
            if begin:
                yield b","
            yield dumps(values[begin : begin + _PIECE_VALUES].tolist())[1:-1]

    def _strings(self) -> Iterator[bytes]:
        data, left = to_bytes(self._output), prod(self._output.shape)
        end = 0
        while left:
            begin, count, length = end, 0, 0
            while count < min(left, _PIECE_VALUES) and end - begin < _PIECE_BYTES:
                length = int.from_bytes(data[end : end + LENGTH_BYTES], "little")
                if count and length > _PIECE_BYTES:
                    break
                end += LENGTH_BYTES + length
                count += 1
            if end > len(data):
                raise ModelError(f"output '{self._name}' has strings that its bytes do not hold")
            if begin:
                yield b","
            if end - begin > _PIECE_BYTES and count == 1:
                yield from self._long_string(data[begin + LENGTH_BYTES : end])
            else:
                yield dumps(texts_of(self._name, (count,), data[begin:end]))[1:-1]
            left -= count
        if end != len(data):
            raise ModelError(f"output '{self._name}' has more bytes than its strings")

    def _long_string(self, data: memoryview) -> Iterator[bytes]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        yield b'"'
        for begin in range(0, len(data), _PIECE_BYTES):
            piece = bytes(data[begin : begin + _PIECE_BYTES])
            try:
                text = decoder.decode(piece, begin + _PIECE_BYTES >= len(data))
            except UnicodeDecodeError:
                raise no_utf8(self._name) from None
            yield dumps(text)[1:-1]
        yield b'"'


def values_of(name: str, output: WireTensor, *, is_flat: bool = False) -> Any:
    """Return the values of an output for a document: a list if they are few. Raises `ModelError` for values that JSON
    cannot hold.

    `is_flat`: a single value stands without brackets.
    """
    if output.raw.nbytes > SHORT_BYTES:
        return JsonValues(name, output, is_flat=is_flat)
    values = to_values(name, output)
    return values[0] if is_flat and len(values) == 1 else values


def is_long(document: object) -> bool:
    """Return True if a document has to be written in pieces."""
    if isinstance(document, dict):
        document = document.values()
    elif not isinstance(document, list):
        return isinstance(document, JsonValues)
    return any(isinstance(each, dict | JsonValues) and is_long(each) for each in document)


async def write(exchange: HttpExchange, document: Any, most_bytes: int) -> list[bytes]:
    """Return the text of a document in pieces; none if the client goes meanwhile.

    Raises `InvalidRequest` for more than `most_bytes`, and `ModelError` for values that JSON cannot hold.
    """
    written: list[bytes] = []
    pieces: list[bytes] = []
    size_bytes = total_bytes = 0
    async with exchange.writing:
        for piece in _pieces(document):
            pieces.append(piece)
            size_bytes += len(piece)
            if size_bytes < _PIECE_BYTES // 2:
                continue
            total_bytes += size_bytes
            check_values(total_bytes, most_bytes)
            written.append(b"".join(pieces))
            pieces, size_bytes = [], 0
            await asyncio.sleep(0)
            if exchange.is_gone:
                return []
        check_values(total_bytes + size_bytes, most_bytes)
    return [*written, b"".join(pieces)]


def _pieces(document: Any) -> Iterator[bytes]:
    if isinstance(document, JsonValues):
        yield from document.pieces()
    elif isinstance(document, Mapping):
        yield b"{"
        for number, (name, value) in enumerate(document.items()):
            yield b"%b%b:" % (b"," if number else b"", dumps(name))
            yield from _pieces(value)
        yield b"}"
    elif isinstance(document, list) and is_long(document):
        yield b"["
        for number, value in enumerate(document):
            if number:
                yield b","
            yield from _pieces(value)
        yield b"]"
    else:
        yield dumps(document)
