"""Sends requests of HTTP byte by byte, without a client's library: what is wrong with them is to arrive."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

TIMEOUT_S = 60.0
# Longer answers are cut: the server may be anybody's.
_MOST_BYTES = 16 << 20


class Http(NamedTuple):
    """Is a request. With `until`, it is repeated under a deadline until the status is that one; with `has`, until the
    body has that text.
    """

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = {}
    until: int = 0
    has: bytes = b""


class WireReply(NamedTuple):
    """Is a response. Of headers that came twice it has the last; names are in lower case."""

    status: int
    reason: str
    headers: dict[str, str]
    body: bytes


def get(path: str, **headers: str) -> Http:
    """Make a request. Headers have underscores in place of hyphens."""
    return Http("GET", path, b"", _headers(headers))


def post(path: str, body: Any = b"", **headers: str) -> Http:
    """Make a request with a body: bytes as they are, anything else as JSON."""
    return Http("POST", path, as_bytes(body), _headers(headers))


def infer(model: str, body: Any, **headers: str) -> Http:
    """Make an inference request."""
    return post(f"/v2/models/{model}/infer", body, **headers)


def binary(model: str, header: Any, tensors: bytes, size: object = None, **headers: str) -> Http:
    """Make a request with the binary extension. `size` lies about the length of its JSON."""
    text = as_bytes(header)
    said = str(len(text) if size is None else size)
    return infer(model, text + tensors, Inference_Header_Content_Length=said, **headers)


def as_bytes(body: Any) -> bytes:
    """Return a body as it travels."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def send(port: int, request: Http, host: str = "localhost") -> WireReply:
    """Send a request on a connection of its own. Raises OSError and `http.client.HTTPException`."""
    head = [f"{request.method} {request.path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    head += [f"{name}: {value}" for name, value in request.headers.items()]
    if request.body or request.method == "POST":
        head.append(f"Content-Length: {len(request.body)}")
    packet = "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + request.body
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        connection.sendall(packet)
        response = http.client.HTTPResponse(connection, method=request.method)
        try:
            response.begin()
            body = response.read(_MOST_BYTES)
            headers = {name.lower(): value for name, value in response.getheaders()}
            return WireReply(response.status, response.reason, headers, body)
        finally:
            response.close()
