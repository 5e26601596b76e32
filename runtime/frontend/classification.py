"""Triton's classification extension: the best classes of an output in place of its numbers.

https://github.com/triton-inference-server/server, docs/protocol/extension_classification.md
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.bytes_tensor import encode_bytes
from moonpool.ipc.tensors import BF16, BYTES, CODES, DTYPES, NAMES
from moonpool.runtime.errors import ModelError
from moonpool.runtime.frontend.tensors import to_bytes
from moonpool.runtime.repository_files import LeadsOut, read_file
from moonpool.runtime.request import Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.backend import Model

_UNCOUNTABLE = (CODES["BOOL"], CODES["FP16"], BYTES, BF16)
# A file of labels is read for each request that asks for classes.
_LABELS_BYTES = 4 << 20


def classify(
    name: str, output: Wire, count: int, *, batches: bool, labels: Sequence[str] = ()
) -> Wire:
    """The `count` largest values of each row as BYTES `value:index`, or `value:index:label`, the largest first.

    The shape is (rows, count) where the model batches, else (count,); with fewer values than `count`, as many as there
    are. Raises `ModelError` for datatypes that cannot be compared.
    """
    if output.datatype in _UNCOUNTABLE:
        raise ModelError(
            f"class result not available for output '{name}' due to unsupported type "
            f"'{NAMES[output.datatype]}'",
            "INVALID_ARG",
        )
    # A copy: what is sorted must not change meanwhile, and the model may still write to its memory.
    values = np.frombuffer(bytes(to_bytes(output)), DTYPES[output.datatype])
    rows = output.shape[0] if batches and output.shape else 1
    table = values.reshape(rows, prod(output.shape) // rows if rows else 0)
    count = min(count, table.shape[1])
    # Of equal values the first one goes first.
    best = np.argsort(table[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :count]
    best = table.shape[1] - 1 - best
    texts = np.empty((rows, count), object)
    for row, indices in enumerate(best.tolist()):
        texts[row] = [_text(table[row, index], index, labels) for index in indices]
    shape = (rows, count) if batches else (count,)
    return Wire(BYTES, shape, np.frombuffer(encode_bytes(texts), np.uint8))


def _text(value: np.generic, index: int, labels: Sequence[str]) -> str:
    shown = f"{value:f}" if value.dtype.kind == "f" else str(value)
    return f"{shown}:{index}:{labels[index]}" if index < len(labels) else f"{shown}:{index}"


def read_labels(model: Model, output: str) -> list[str]:
    """The lines of the file that the configuration names for this output; none where it names none.

    Raises `ModelError` where the file cannot be read.
    """
    described = [each for each in model.config.raw["output"] if each["name"] == output]
    filename = described[0].get("label_filename", "") if described else ""
    if not filename:
        return []
    source = model.source
    try:
        # Clients get its lines, so it must be a file of the model's own.
        own = (source.model_directory, source.version_directory)
        data = read_file(source.model_directory / filename, _LABELS_BYTES, own)
    except LeadsOut as error:
        what = "their file is not in the model's directory"
        raise ModelError(f"cannot read the labels of output '{output}': {what}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ModelError(f"cannot read the labels of output '{output}': {why}") from error
    return data.decode(errors="replace").splitlines()
