"""Both servers answer the same requests alike: status, headers, values, texts, streams and their ends."""

from __future__ import annotations

import pytest
from tests.triton.protocol.conftest import Servers
from tests.triton.protocol.known import difference

from moonpool.runtime.conformance.cases import Case, all_cases

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("region")]


@pytest.mark.promise("HTTP", "In `generate`, a member of `parameters` with the name of an input is that input.")
@pytest.mark.promise("gRPC", "Reflection is off unless it …")
@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "moonpool answers over HTTP and gRPC as a tritonserver does: status, headers, values, "
    "texts, streams. Where it does not, FIDELITY says why.",
)
@pytest.mark.parametrize("case", [pytest.param(each, id=each.name[:100]) for each in all_cases()])
def test_both_answer_alike(servers: Servers, case: Case) -> None:
    theirs = servers.expected(case)
    ours = case.ask(servers.moonpool)

    known = difference(case.name)
    if known is None:
        assert ours == theirs
    else:
        assert ours != theirs, f"no longer different: {known}"
