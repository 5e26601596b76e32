"""The limit of open files, and the part of it that is for clients."""

from __future__ import annotations

import resource

import pytest

from moonpool.runtime.server import listening
from moonpool.runtime.server.listening import Connections
from moonpool.runtime.server.options.table import ServerOptions

pytestmark = pytest.mark.promise("The server (`moonpool serve`)", "Clients that connect and stay leave …")

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.promise("What the server bears, and whom it answers like", "All ports together take at most …")
@pytest.mark.parametrize("limit", [256, 1024, 20_000])
def test_half_is_left_to_models(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))

    http, grpc, metrics, together = listening.connections(ServerOptions())

    assert 0.48 * limit < together + metrics + http / 8 <= 0.5 * limit
    assert together == pytest.approx(http + grpc, abs=2)
    assert metrics == pytest.approx(http / 8, abs=2)
    assert http == pytest.approx(2 * grpc, rel=0.05)


@pytest.mark.parametrize("limit", [1 << 17, NO_LIMIT])
def test_where_there_is_room_there_are_as_many_connections_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    options = ServerOptions(http_max_connections=700, grpc_max_connections=300)

    assert listening.connections(options) == Connections(700, 300, 87, 1000)
    assert listening.connections(ServerOptions()) == Connections(16_384, 8192, 2048, 24_576)


@pytest.mark.parametrize(
    ("most", "then"),
    [
        (1000, Connections(700, 300, 87, 913)),
        (400, Connections(350, 300, 50, 350)),
        (80, Connections(70, 70, 10, 70)),
        (1, Connections(1, 1, 1, 1)),
    ],
)
def test_all_ports_together_have_the_connections_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, most: int, then: Connections
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (NO_LIMIT, NO_LIMIT))
    options = ServerOptions(http_max_connections=700, grpc_max_connections=300, max_connections=most)

    assert listening.connections(options) == then


@pytest.mark.parametrize(
    ("limits", "then"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 20), (1 << 16, 1 << 20)),
        ((1024, NO_LIMIT), (1 << 16, NO_LIMIT)),
        ((4096, 4096), None),
        ((1 << 17, 1 << 20), None),
        ((NO_LIMIT, NO_LIMIT), None),
    ],
)
def test_a_limit_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], then: tuple[int, int] | None
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: made.append(wanted))

    listening.raise_limit()

    assert made == ([] if then is None else [then])
