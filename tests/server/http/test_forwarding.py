"""Headers that become parameters of requests."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.server.http.served import served
from tests.server.http.serving import Serving

from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.server.inference.forwarding import ForwardedHeaders

GENERATE = "/v2/models/speaks/generate"


@pytest.fixture(scope="module")
def forwarding() -> Iterator[Serving]:
    with served("speaks", header_forward_pattern="user|PREFIX_.*|priority|triton_.*") as made:
        yield made


@pytest.mark.promise(
    "HTTP", "A header is forwarded if a part of its name matches, in any case, under the name that was sent."
)
def test_a_part_of_the_name_matches_in_any_case(forwarding: Serving) -> None:
    headers = {"X-User-Name": "ada", "Prefix_a": "1", "Other": "2"}
    reply = forwarding.post(GENERATE, {"text_input": "hi"}, headers)

    assert json.loads(reply.value["told"]) == {"X-User-Name": "ada", "Prefix_a": "1"}


@pytest.mark.promise("HTTP", "A forwarded header cannot set a parameter that means something to the server.")
@pytest.mark.parametrize("name", ["Priority", "TRITON_enable_empty_final_response"])
@pytest.mark.parametrize("what", ["infer", "generate", "generate_stream"])
def test_a_reserved_name_is_refused(forwarding: Serving, name: str, what: str) -> None:
    reply = forwarding.post(f"/v2/models/speaks/{what}", {"text_input": "hi"}, {name: "5"})

    text = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    assert (reply.status, reply.error) == (400, text)
    assert forwarding.get("/v2/models/speaks", {name: "5"}).status == 200


@pytest.mark.parametrize(
    "name",
    [
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "headers",
        "binary_data_output",
        "triton_",
        "Triton_Any",
    ],
)
def test_every_reserved_name_is_refused_if_it_matches(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is reserved for Triton usage"):
        ForwardedHeaders(".*").choose([("a", "b"), (name, "1")])
    assert ForwardedHeaders("^a$").choose([("a", "b"), (name, "1")]) == {"a": "b"}
