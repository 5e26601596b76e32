"""Outputs of a model: copied at the moment of sending, and compared with its configuration."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import BF16, BYTES, DTYPES, code_of, decode_bytes
from moonpool.ipc.tensors import NAMES as DATATYPES
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.testing.response import Response


class BadOutput(MoonpoolError):
    """An output differs from what the model's configuration promises to clients."""


def copied(tensor: Tensor) -> NDArray[Any]:
    """Copy a tensor into the array that a client gets; BYTES become an object array of `bytes`."""
    if not tensor.is_cpu():
        return np.array(tensor._data.to_host())
    if tensor._wire is None:
        return np.array(tensor._array)
    raw = np.array(tensor._wire)
    if tensor._datatype == BYTES:
        return decode_bytes(raw.data, tensor._shape)
    return raw[: 2 * prod(tensor._shape)].view(DTYPES[BF16]).reshape(tuple(tensor._shape))


def check_outputs(response: Response, config: ModelConfig, rows: int | None) -> None:
    """Raise `BadOutput` unless names, datatypes and shapes of the outputs are those of the configuration.

    `rows` is the batch dimension of the request, or None if outputs may have another one. A runtime drops outputs that
    the configuration does not name, and lets the others pass, as Triton does. But clients and other models rely on the
    configuration.
    """
    expected = {tensor.name: tensor for tensor in config.outputs}
    for name in response.unknown:
        raise BadOutput(
            f"model '{config.name}' made an output '{name}', and the configuration has {list(expected)}: no "
            "client would get it"
        )
    for name, array in response.outputs.items():
        tensor = expected[name]
        datatype = DATATYPES[code_of(array.dtype, name)]
        if datatype != tensor.datatype and not (datatype == "UINT16" and tensor.datatype == "BF16"):
            raise BadOutput(
                f"output '{name}' of model '{config.name}' is {datatype}, and the configuration says {tensor.datatype}"
            )
        dims = list(tensor.dims)
        if config.max_batch_size:
            dims = [-1 if rows is None else rows, *dims]
        shape = list(array.shape)
        if len(shape) != len(dims) or any(want not in (-1, have) for want, have in zip(dims, shape, strict=True)):
            raise BadOutput(
                f"output '{name}' of model '{config.name}' has the shape {shape}, and the "
                f"configuration says {dims} (-1 is any size)"
            )
