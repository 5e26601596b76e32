"""The response to a request for inference, as JSON with binary tensors behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moonpool.ipc.memo import Memo
from moonpool.ipc.tensors import NAMES
from moonpool.runtime.details import check_finite
from moonpool.runtime.frontend.classification import classify, read_labels
from moonpool.runtime.frontend.http.head import JSON
from moonpool.runtime.frontend.http.json_text import check_values, dumps
from moonpool.runtime.frontend.tensors import to_bytes, to_values
from moonpool.runtime.request import Wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonpool.runtime.backend import Model
    from moonpool.runtime.frontend.http.exchange import Part
    from moonpool.runtime.frontend.http.head import Headers
    from moonpool.runtime.frontend.http.infer_request import OutputPlan, Plan
    from moonpool.runtime.frontend.service import Service
    from moonpool.runtime.request import Parameter, Response

_MEMORABLE_ID = 64
# The JSON and the headers of responses that differ in the numbers of their tensors only.
# The size in bytes is None where they are not in the body.
_Shape = tuple[str, int, tuple[int, ...], int | None]
_known: Memo[tuple[str, int, str, tuple[_Shape, ...]], tuple[bytes, Headers]] = Memo(512)


def render(
    service: Service, model: Model, plan: Plan, response: Response, most_json_bytes: int
) -> tuple[Headers, list[Part]]:
    """Headers and body. Outputs are views on the response, but for those that JSON carries.

    Writes what belongs into clients' memory. Raises `MoonpoolError` for outputs that cannot go where they should, and
    for those of more bytes than JSON is to carry.
    """
    outputs: Mapping[str, Wire] = response.outputs  # type: ignore[assignment]
    if plan.is_plain and not response.parameters:
        parts: list[Part] = []
        shapes: list[_Shape] = []
        for name, output in outputs.items():
            place = plan.places.get(name) if plan.places else None
            if place is not None:
                service.write_shared(name, output, place)
                shapes.append((name, output.datatype, output.shape, None))
                continue
            data = output.raw.data if output.raw.ndim == 1 else to_bytes(output)
            parts.append(data)
            shapes.append((name, output.datatype, output.shape, len(data)))
        return _plain(model, plan.request_id, tuple(shapes), parts)
    described, parts = [], []
    values_bytes = 0
    for name, output in outputs.items():
        how = plan.wanted.get(name, plan.rest)
        if how.classes:
            labels = read_labels(model, name)
            batches = model.config.max_batch_size > 0
            output = classify(name, output, how.classes, batches=batches, labels=labels)
        if how.place is None and not how.is_binary:
            values_bytes += output.raw.nbytes
            check_values(values_bytes, most_json_bytes)
        described.append(_describe(service, name, output, how, parts))
    text = dumps(_root(model, plan.request_id, described, response.parameters))
    return _headers(text, parts), [text, *parts]


def _plain(
    model: Model, request_id: str, shapes: tuple[_Shape, ...], parts: list[Part]
) -> tuple[Headers, list[Part]]:
    key = (model.name, model.version, request_id, shapes)
    known = _known.get(key)
    if known is None:
        described: list[dict[str, Any]] = [
            {"name": name, "datatype": NAMES[datatype], "shape": shape}
            | ({} if size_bytes is None else {"parameters": {"binary_data_size": size_bytes}})
            for name, datatype, shape, size_bytes in shapes
        ]
        text = dumps(_root(model, request_id, described, {}))
        known = text, _headers(text, parts)
        if len(request_id) <= _MEMORABLE_ID:
            _known.keep(key, known)
    text, headers = known
    return headers, [text, *parts]


def _root(
    model: Model,
    request_id: str,
    outputs: list[dict[str, Any]],
    parameters: Mapping[str, Parameter],
) -> dict[str, Any]:
    root: dict[str, Any] = {"id": request_id} if request_id else {}
    root |= {"model_name": model.name, "model_version": str(model.version)}
    if parameters:
        check_finite(parameters)
        root["parameters"] = dict(parameters)
    root["outputs"] = outputs
    return root


def _describe(
    service: Service, name: str, output: Wire, how: OutputPlan, parts: list[Part]
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": name,
        "datatype": NAMES[output.datatype],
        "shape": output.shape,
    }
    if how.place is not None:
        service.write_shared(name, output, how.place)
    elif how.is_binary:
        data = to_bytes(output)
        parts.append(data)
        described["parameters"] = {"binary_data_size": len(data)}
    else:
        described["data"] = to_values(name, output)
    return described


def _headers(text: bytes, parts: list[Part]) -> Headers:
    if not parts:
        return JSON
    return (
        (b"Content-Type", b"application/octet-stream"),
        (b"Inference-Header-Content-Length", b"%d" % len(text)),
    )
