"""A model behaves the same in every host: in a test, a stub, a server, a tritonserver, and in Triton itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.behaviour import hosts
from tests.behaviour.cases import CASES, PRELUDE
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.triton.recording import RECORDING

pytestmark = pytest.mark.promise(
    "Requests between models",
    "A model behaves the same in a test's process, in a stub, in a server and in a tritonserver.",
)

Host = Callable[[Path], AbstractContextManager[hosts.Ask]]
TRITON = pytest.mark.triton, pytest.mark.timeout(600)
HOSTS: list[Any] = [
    pytest.param(hosts.in_process, id="in process"),
    pytest.param(hosts.in_stub, id="in stub"),
    pytest.param(hosts.served, id="served"),
    pytest.param(hosts.in_tritonserver, id="in tritonserver", marks=TRITON),
    # The cases say what Triton does, and it is asked again where the recordings are made.
    *([pytest.param(hosts.in_triton, id="in triton", marks=TRITON)] if RECORDING.is_live else []),
]


@pytest.fixture(scope="module", params=HOSTS)
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, hosts.Ask]]:
    """One host, and how to ask it."""
    with request.param(tmp_path_factory.mktemp("host")) as ask:
        yield request.param, ask


@pytest.mark.promise(
    "Requests between models",
    "A call may have any number of responses, and they come in order. A loop over them that was "
    "left goes on from there, in the first pass and in later ones. If nothing refers to an "
    "iterator any more, its request is cancelled.",
)
@pytest.mark.promise(
    "Requests between models",
    "A coroutine that calls a decoupled model gets its iterator with the first response. Until "
    "then the event loop goes on.",
)
@pytest.mark.promise(
    "Requests between models",
    "`cancel` of an iterator only sets the flag that the other model reads: its responses come "
    "in order, up to its own end.",
)
@pytest.mark.parametrize("name", CASES)
def test_a_model_behaves_the_same(host: tuple[Host, hosts.Ask], name: str) -> None:
    case = CASES[name]
    if host[0] is hosts.in_triton and not case.is_tritons:
        pytest.skip("newer than this Triton, or another behaviour on purpose")
    lines = (PRELUDE + case.code).split("\n")

    said = host[1]("\n".join([*lines[:-1], f"json.dumps([{lines[-1]}])"]))

    assert said == repr(json.dumps([*case.values])), said


def test_they_are_checked(tmp_path: Path) -> None:
    assert hosts.check(tmp_path) == [f"ok: {name}" for name in sorted((hosts.ASKER, *hosts.ASKED))]
