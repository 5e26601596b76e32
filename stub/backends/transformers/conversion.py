"""Hands over the tensors of pickled weights, as bytes: `moonpool convert` writes them as safetensors.

Nothing that a pickle names is called but what makes tensors (`weights_only`), and the sandbox contains what goes wrong
in spite of this. The program that asks checks the list of tensors, asks for their bytes and counts them.
"""

from __future__ import annotations

import json
import os
from typing import TypedDict

import numpy as np
import torch
from loading import Folder, asked

from moonpool import Bytes, Int64, UInt8


class Piece(TypedDict):
    PIECE: UInt8[:]


# As safetensors names them.
KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class Conversion:
    max_batch_size = 0

    def __init__(self, config: dict) -> None:
        self.folder = Folder(config)
        self.file = ""
        self.tensors: list[tuple[str, torch.Tensor]] = []
        # The tensor that was asked for last, in one piece of memory.
        self.number, self.rows = -1, torch.empty(0, dtype=torch.uint8)

    def __call__(self, FILE: Bytes[1], PLACE: Int64[3]) -> Piece:
        """Return bytes of a tensor: `PLACE` is its number, the first byte, and the count. -1 asks for the list."""
        file, (number, start, count) = FILE[0].decode(), PLACE.tolist()
        if file != self.file:
            self.tensors, self.number, self.file = self._read(file), -1, file
        if number < 0:
            rows = [(name, KINDS[each.dtype], list(each.shape)) for name, each in self.tensors]
            return {"PIECE": np.frombuffer(json.dumps(rows).encode(), np.uint8)}
        if number != self.number:
            self.rows = self.tensors[number][1].contiguous().reshape(-1).view(torch.uint8)
            self.number = number
        return {"PIECE": self.rows[start : start + count].numpy()}

    def _read(self, file: str) -> list[tuple[str, torch.Tensor]]:
        path = os.path.join(self.folder.path, file)
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive(path))
        except torch.serialization.pickle.UnpicklingError as error:
            what = asked(self.folder.path, file, error) or f"{file} was not unpickled: {first_line(error)}"
            raise ValueError(what) from None
        if not isinstance(found, dict) or not found:
            raise ValueError(f"{file} holds {type(found).__name__}, where weights are a dictionary of tensors")
        for name, each in found.items():
            if not isinstance(name, str) or not isinstance(each, torch.Tensor):
                raise ValueError(f"{file} has {type(each).__name__} at {name!r:.100}, where weights have tensors")
            if each.layout is not torch.strided or each.dtype not in KINDS:
                raise ValueError(
                    f"{file}: safetensors has no tensors such as {name!r:.100}, {each.dtype}, {each.layout}"
                )
        return [(name, each.detach()) for name, each in found.items()]


def is_archive(path: str) -> bool:
    """Return True for the form of PyTorch 1.6 and later, which can be mapped."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\3\4"


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
