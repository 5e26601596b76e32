"""Models in moonpool's stubs write to the log of a tritonserver."""

from __future__ import annotations

import pytest
from tests.triton.backend.hosting import TIMEOUT_S, Client, HostingServer
from tests.waiting import wait_until


@pytest.mark.promise(
    "The launcher of a tritonserver", "If a model floods the server's log, some of its lines are left out."
)
def test_a_flood_of_lines_is_heard_in_part_and_the_rest_is_counted(client: Client, server: HostingServer) -> None:
    client.order("log 20000")

    def is_told() -> bool:
        # The next accepted line comes with the count.
        client.order("log 1")
        return "lines of an instance were left out: too many a second" in server.log()

    wait_until(is_told, TIMEOUT_S)
    assert server.log().count("line ") < 10_000
