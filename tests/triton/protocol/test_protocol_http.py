"""Both servers answer the same requests over HTTP in the same way: status, headers, values, texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.server.wire import Http, Reply, get, post, send
from tests.triton.protocol import control_cases, inference_cases
from tests.triton.protocol.comparing import comparable
from tests.triton.protocol.conftest import Server, Servers
from tests.triton.protocol.known import difference
from tests.waiting import wait_until

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("region")]

TABLES = {
    "success": inference_cases.SUCCESS,
    "json": inference_cases.WRONG_JSON,
    "tensors": inference_cases.WRONG_TENSORS,
    "binary": inference_cases.BINARY,
    "datatypes": inference_cases.DATATYPES,
    "parameters": inference_cases.PARAMETERS,
    "sequences": inference_cases.SEQUENCES,
    "classes": inference_cases.CLASSES,
    "compression": inference_cases.COMPRESSION,
    "metadata": control_cases.METADATA,
    "models": control_cases.WHICH_MODEL,
    "generate": control_cases.GENERATE,
    "memory": control_cases.SHARED_MEMORY,
    "repository": control_cases.REPOSITORY,
    "settings": control_cases.SETTINGS,
}
INDEX = post("/v2/repository/index")
REGIONS_PATH = "/v2/systemsharedmemory"
REGIONS_STATUS = get(f"{REGIONS_PATH}/status")
CASES = [
    pytest.param(f"{table}: {name}", requests, id=f"{table}: {name}"[:100])
    for table, cases in TABLES.items()
    for name, requests in cases
]


def _ask(server: Server, request: Http) -> Reply:
    if not request.until and not request.has:
        if request.path.startswith(REGIONS_PATH) and request.path.endswith("/unregister"):
            gone = wait_until(lambda: _forgotten(server, request), what="the region to be gone")
            assert gone is not None
            return gone
        reply = send(server.http_port, request)
        if request.path.endswith("/unload"):
            # Several answers are right until it is gone.
            wait_until(lambda: b"UNLOADING" not in send(server.http_port, INDEX).body)
        return reply

    def asked() -> Reply | None:
        reply = send(server.http_port, request)
        is_it = reply.status == request.until if request.until else request.has in reply.body
        return reply if is_it else None

    found = wait_until(asked, 60.0, f"{request.path} to be {request.until or request.has!r}")
    assert found is not None
    return found


def _forgotten(server: Server, request: Http) -> Reply | None:
    """Unregister, and return the reply if the region is gone, all of them where none is named.

    A tritonserver refuses this, or does nothing, while a request still holds the region, maybe after its answer.
    """
    reply = send(server.http_port, request)
    if reply.status != 200 and b"nregister" in reply.body:
        return None
    kept = {each["name"] for each in json.loads(send(server.http_port, REGIONS_STATUS).body)}
    _, named, name = request.path.removesuffix("/unregister").partition("/region/")
    return None if (name in kept if named else kept) else reply


def _answers(server: Server, requests: list[Http]) -> list[Any]:
    """Return the answers to compare. The number of polls until a change was done is left out."""
    replies = [(request, _ask(server, request)) for request in requests]
    return [comparable(reply) for request, reply in replies if not request.until]


@pytest.mark.promise("HTTP", "In `generate`, a member of `parameters` with the name of an input is that input.")
@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "moonpool answers over HTTP and gRPC as a tritonserver does: status, headers, values, "
    "texts, streams. Where it does not, FIDELITY says why.",
)
@pytest.mark.parametrize(("case", "requests"), CASES)
def test_both_answer_alike(servers: Servers, case: str, requests: list[Http]) -> None:
    theirs = servers.recorded(repr(requests), lambda triton: _answers(triton, requests))
    ours = _answers(servers.moonpool, requests)

    known = difference(case)
    if known is None:
        assert ours == theirs
    else:
        assert ours != theirs, f"no longer different: {known}"
