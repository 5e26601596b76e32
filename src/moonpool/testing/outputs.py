"""Outputs of a model, copied as they are when they are sent, and held against its configuration."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.bytes_tensor import decode_bytes
from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import BF16, BYTES, DTYPES, code_of
from moonpool.ipc.tensors import NAMES as DATATYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.runtime.config import ModelConfig
    from moonpool.stub.tensor import Tensor
    from moonpool.testing.response import Response


class BadOutput(MoonpoolError):
    """An output that is not what the model's configuration tells its clients."""


def copied(tensor: Tensor) -> NDArray[Any]:
    """The array of a client: another memory than the model's, BYTES as an object array of `bytes`."""
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

    `rows` is the batch dimension of the request, None where that of the outputs may be another. A runtime leaves out what
    has no name there, and lets the rest pass, as Triton does; but clients, and other models, rely on the configuration.
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
                f"output '{name}' of model '{config.name}' is {datatype}, and the configuration says "
                f"{tensor.datatype}"
            )
        dims = list(tensor.dims)
        if config.max_batch_size:
            dims = [-1 if rows is None else rows, *dims]
        shape = list(array.shape)
        if len(shape) != len(dims) or any(
            want not in (-1, have) for want, have in zip(dims, shape, strict=True)
        ):
            raise BadOutput(
                f"output '{name}' of model '{config.name}' has the shape {shape}, and the "
                f"configuration says {dims} (-1 is any size)"
            )
