"""Whatever a stub sends to the library inside tritonserver, the server stays up and says what was wrong.

The library is made with the sanitizers for addresses and for undefined behaviour, which end the server where it does
what it must not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from tests.faults.known import FAULTS
from tests.triton.answers import Answer, Outcome
from tests.triton.sanitized.server import ADDRESSES, OUTPUTS, SanitizedServer, write_models
from tests.triton.triton_side import TritonSide
from tests.waiting import wait_until

# The first test waits for the compiler.
pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]
# How the log tells of the end of a process: for a breach, for an end of its own, and for what is no answer.
ENDED = re.compile(r"broke the protocol and was ended: \w|is not healthy|took longer than 3 s")
# What harms nobody but its own requests.
BORNE = {"blocks that hold nothing", "strings that are none"}
X = np.arange(4, dtype=np.float32)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SanitizedServer]:
    repository = tmp_path_factory.mktemp("hostile")
    write_models(repository)
    folder = tmp_path_factory.mktemp("server")
    server = SanitizedServer(ADDRESSES, repository, folder, list(OUTPUTS))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def side(hostile: SanitizedServer) -> Iterator[TritonSide]:
    side = TritonSide(hostile)
    yield side
    side.close()


def ask(side: TritonSide, fault: str = "") -> Outcome:
    return side.infer("rogue", {"X": X}, request_id=fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stub_that_breaks_the_protocol_is_ended_and_the_server_stays(
    hostile: SanitizedServer, side: TritonSide, fault: str
) -> None:
    assert isinstance(ask(side), Answer)
    heard = len(hostile.log())

    ask(side, fault)

    if fault not in BORNE:
        # How it did that is for the log alone.
        wait_until(lambda: ENDED.search(hostile.log()[heard:]), 20.0, "a reason in the log")
    wait_until(lambda: isinstance(ask(side), Answer), 30.0, "another process")
    assert isinstance(side.infer("sibling", {"X": X}), Answer)
