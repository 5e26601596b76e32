"""Writes responses to requests for inference over HTTP: JSON, with binary tensors behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from moonpool.ipc.memo import Memo
from moonpool.ipc.tensors import NAMES
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.details import check_finite
from moonpool.runtime.model.request import Parameter, Response, WireTensor
from moonpool.runtime.server.http.head import JSON, Headers, Part
from moonpool.runtime.server.http.infer_request import HttpRequestPlan, OutputPlan
from moonpool.runtime.server.http.json_pieces import is_long, values_of
from moonpool.runtime.server.http.json_text import check_values, dumps
from moonpool.runtime.server.inference.response import classified
from moonpool.runtime.server.inference.tensors import to_bytes
from moonpool.runtime.server.service import Service

# What stands before the outputs of a model, and before the shape of an output of this name and datatype.
_models: Memo[tuple[str, int], bytes] = Memo()
_outputs: Memo[tuple[str, int], bytes] = Memo()


class LongAnswer(NamedTuple):
    """An answer whose JSON has to be written in pieces. `parts` follow it."""

    document: dict[str, Any]
    parts: list[Part]


def render(
    service: Service, model: Model, plan: HttpRequestPlan, response: Response, most_json_bytes: int
) -> tuple[Headers, list[Part]] | LongAnswer:
    """Return headers and body, or what they are to be made of. Outputs are views on the response, except for those in
    the JSON.

    Writes outputs into memory of the client that the request names for them. Raises `MoonpoolError` for outputs that
    cannot be written there, and for outputs in JSON that have more than `most_json_bytes` bytes.
    """
    outputs: Mapping[str, WireTensor] = response.outputs  # type: ignore[assignment]
    parts: list[Part] = []
    if plan.is_plain and not response.parameters:
        text = [b'{"id":', plan.id_text, b","] if plan.id_text else [b"{"]
        text.append(_model_text(model))
        is_first = True
        places = plan.places
        for name, output in outputs.items():
            datatype, shape, raw = output
            if not is_first:
                text.append(b",")
            is_first = False
            text.append(_output_text(name, datatype))
            text.append(orjson.dumps(shape))
            if places and name in places:
                service.write_shared(name, output, places[name])
                text.append(b"}")
                continue
            data = raw.data if raw.ndim == 1 else to_bytes(output)
            parts.append(data)
            text.append(b',"parameters":{"binary_data_size":%d}}' % len(data))
        text.append(b"]}")
        whole = b"".join(text)
        return _headers(len(whole), parts), [whole, *parts]
    described: list[dict[str, Any]] = []
    values_bytes = 0
    for name, output in outputs.items():
        how = plan.wanted.get(name, plan.rest)
        if how.classes:
            output = classified(service.models.find, model, name, output, how.classes)
        if how.place is None and not how.is_binary:
            values_bytes += output.raw.nbytes
            check_values(values_bytes, most_json_bytes)
        described.append(_describe(service, name, output, how, parts))
    root = _root(model, plan.request_id, described, response.parameters)
    if values_bytes and is_long(described):
        return LongAnswer(root, parts)
    document = dumps(root)
    if values_bytes:
        check_values(len(document), most_json_bytes)
    return finished([document], parts)


def finished(text: list[bytes], parts: list[Part]) -> tuple[Headers, list[Part]]:
    """Return headers and body of an answer with this JSON, which may come in pieces."""
    return _headers(sum(map(len, text)), parts), [*text, *parts]


def _model_text(model: Model) -> bytes:
    """Return the text with which each response of a model begins, up to its first output."""
    key = (model.name, model.version)
    known = _models.get(key)
    return known or _models.keep(key, dumps(_root(model, "", [], {}))[1:-2])


def _output_text(name: str, datatype: int) -> bytes:
    """Return the description of an output before its shape."""
    key = (name, datatype)
    known = _outputs.get(key)
    return known or _outputs.keep(key, dumps({"name": name, "datatype": NAMES[datatype], "shape": []})[:-3])


def _root(
    model: Model, request_id: str, outputs: list[dict[str, Any]], parameters: Mapping[str, Parameter]
) -> dict[str, Any]:
    root: dict[str, Any] = {"id": request_id} if request_id else {}
    root["model_name"], root["model_version"] = model.name, str(model.version)
    if parameters:
        check_finite(parameters)
        root["parameters"] = dict(parameters)
    root["outputs"] = outputs
    return root


def _describe(service: Service, name: str, output: WireTensor, how: OutputPlan, parts: list[Part]) -> dict[str, Any]:
    described: dict[str, Any] = {"name": name, "datatype": NAMES[output.datatype], "shape": output.shape}
    if how.place is not None:
        service.write_shared(name, output, how.place)
    elif how.is_binary:
        data = to_bytes(output)
        parts.append(data)
        described["parameters"] = {"binary_data_size": len(data)}
    else:
        described["data"] = values_of(name, output)
    return described


def _headers(text_bytes: int, parts: list[Part]) -> Headers:
    if not parts:
        return JSON
    return ((b"Content-Type", b"application/octet-stream"), (b"Inference-Header-Content-Length", b"%d" % text_bytes))
