"""Digests of requests and of a model's configuration. Two results can be compared if their digests agree."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moonpool.runtime.bench.question import Tensor

# So long that two of a person's results do not have the same one by chance.
_LENGTH = 16


def of_requests(inputs: Iterable[Tensor]) -> str:
    """Compute a digest of the names, datatypes, shapes and bytes of a request's inputs."""
    digest = hashlib.sha256()
    for tensor in inputs:
        head = [tensor.name, tensor.datatype, list(tensor.shape), len(tensor.data)]
        digest.update(json.dumps(head).encode())
        digest.update(tensor.data)
    return digest.hexdigest()[:_LENGTH]


def of_configuration(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Compute a digest of each field of a model's configuration, except its name and fields at their defaults.

    A server writes the same configuration differently over HTTP and gRPC, and may send fields at their defaults. So the
    configuration is first read as Triton's protobuf message. Raises ValueError if it is none.
    """
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2

    message = model_config_pb2.ModelConfig()
    try:
        json_format.ParseDict(dict(configuration), message, ignore_unknown_fields=True)
    except json_format.Error as error:
        raise ValueError(f"no configuration of a model: {error}") from error
    fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
    fields.pop("name", None)
    return {name: _of_json(value) for name, value in sorted(fields.items())}


def of_fields(fields: Mapping[str, str]) -> str:
    """Compute one digest of all fields."""
    return _of_json(dict(fields))


def _of_json(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
