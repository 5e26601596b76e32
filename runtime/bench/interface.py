"""What a model takes, as far as a server tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.ipc.tensors import CODES
from moonpool.runtime.bench.desk import Refused
from moonpool.runtime.config_types import TensorConfig

if TYPE_CHECKING:
    from moonpool.runtime.bench.desk import Desk


@dataclass(frozen=True, slots=True)
class Interface:
    """Dims leave out the batch dimension, as in a configuration."""

    name: str
    max_batch_size: int
    inputs: tuple[TensorConfig, ...]
    decoupled: bool


def interface(desk: Desk, model: str, version: str, *, with_optional: bool = False) -> Interface:
    """Ask for it, with or without optional inputs.

    Raises `Refused` and `Unreachable`, and the errors of `understood` if the answer is malformed.

    A server without Triton's configuration does not say whether there are batches: then there are, if the
    first dimension of all inputs is open.
    """
    metadata = desk.metadata(model, version)
    tensors = []
    for entry in metadata.get("inputs", []):
        if entry["datatype"] not in CODES:
            raise Refused(f"input {entry['name']} of {model} is of datatype {entry['datatype']!r}")
        dims = tuple(int(dim) for dim in entry.get("shape", []))
        if not isinstance(entry["name"], str) or min(dims, default=0) < -1:
            raise ValueError(f"input {entry['name']!r} of shape {dims}")
        tensors.append(TensorConfig(entry["name"], entry["datatype"], dims))
    configuration = desk.configuration(model, version)
    if configuration is None:
        is_batched = bool(tensors) and all(tensor.dims[:1] == (-1,) for tensor in tensors)
        max_batch_size, optional, is_decoupled = int(is_batched), set(), False
    else:
        max_batch_size = int(configuration.get("max_batch_size", 0))
        optional = {t["name"] for t in configuration.get("input", []) if t.get("optional")}
        policy = configuration.get("model_transaction_policy", {})
        is_decoupled = bool(policy.get("decoupled", False))
    inputs = tuple(
        TensorConfig(t.name, t.datatype, t.dims[1:] if max_batch_size else t.dims)
        for t in tensors
        if with_optional or t.name not in optional
    )
    return Interface(model, max_batch_size, inputs, is_decoupled)
