"""Outputs on their way to a client, with Triton's classification extension: the best classes of an output for its
numbers.

https://github.com/triton-inference-server/server, docs/protocol/extension_classification.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Protocol

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import BF16, BYTES, CODES, DTYPES, NAMES, encode_bytes
from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.request import WireTensor
from moonpool.runtime.process.files import LeadsOut
from moonpool.runtime.server.inference.tensors import to_bytes
from moonpool.runtime.stubs.regions import is_clients

_UNCOUNTABLE = (CODES["BOOL"], CODES["FP16"], BYTES, BF16)
# A file of labels is read for each request that asks for classes.


def copied_bytes(outputs: Iterable[WireTensor]) -> int:
    """Return how many bytes of outputs have yet to be copied for the client."""
    return sum(output.raw.nbytes for output in outputs if not is_clients(output.raw))


class Found(Protocol):
    """A model version that was found by its name."""

    model: Model


FindModel = Callable[[str, "int | None"], Found]


def classified(find: FindModel, model: Model, name: str, output: WireTensor, count: int) -> WireTensor:
    """Return the `count` best classes of an output of this model, as `classify` does. Raises `ModelError`.

    `find` returns the models of an ensemble's steps, or raises `MoonpoolError`.
    """
    labels, batches = read_labels(find, model, name), model.config.max_batch_size > 0
    return classify(name, output, count, batches=batches, labels=labels)


def classify(name: str, output: WireTensor, count: int, *, batches: bool, labels: Sequence[str] = ()) -> WireTensor:
    """Return the `count` largest values of each row as BYTES `value:index`, or `value:index:label`, the largest first.

    The shape is (rows, count) if the model batches, else (count,). If a row has fewer values than `count`, all are
    returned. Raises `ModelError` for datatypes that cannot be compared.
    """
    if output.datatype in _UNCOUNTABLE:
        raise ModelError(
            f"class result not available for output '{name}' due to unsupported type '{NAMES[output.datatype]}'",
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
    return WireTensor(BYTES, shape, np.frombuffer(encode_bytes(texts), np.uint8))


def _text(value: np.generic, index: int, labels: Sequence[str]) -> str:
    shown = f"{value:f}" if value.dtype.kind == "f" else str(value)
    return f"{shown}:{index}:{labels[index]}" if index < len(labels) else f"{shown}:{index}"


def read_labels(find: FindModel, model: Model, output: str) -> list[str]:
    """Return the lines of the file that the configuration names for this output, or an empty list if it names no file.

    As in Triton, an output of an ensemble without a file has the labels of the model that writes it. Raises
    `ModelError` if the file cannot be read.
    """
    described = [each for each in model.config.raw["output"] if each["name"] == output]
    filename = described[0].get("label_filename", "") if described else ""
    if not filename:
        return _labels_of_step(find, model, output)
    try:
        return model.source.read_labels(filename)
    except LeadsOut as error:
        what = "their file is not in the model's directory"
        raise ModelError(f"cannot read the labels of output '{output}': {what}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ModelError(f"cannot read the labels of output '{output}': {why}") from error


def _labels_of_step(find: FindModel, model: Model, tensor: str) -> list[str]:
    ensemble = model.config.ensemble
    for step in () if ensemble is None else ensemble.steps:
        for port, written in step.outputs:
            if written == tensor:
                try:
                    member = find(step.model, step.version).model
                except MoonpoolError:  # it was unloaded after it had answered
                    return []
                return read_labels(find, member, port)
    return []
