"""Whatever a stub sends to the library inside tritonserver, the server stays up and says what was wrong.

The library is made with the sanitizers for addresses and for undefined behaviour, which end the server where it does
what it must not.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import MODELS
from tests.faults.known import FAULTS
from tests.runtime.triton.library import library, sanitizer_libraries
from tests.triton.answers import Answer, Outcome
from tests.triton.server import TritonServer, interpreter
from tests.triton.triton_side import TritonSide
from tests.waiting import wait_until

from moonpool.runtime.triton import installation

# The first test waits for the compiler.
pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]
ROGUE_LAUNCHER = Path(__file__).parents[2] / "faults" / "rogue_launcher.py"
CONFIG = """
backend: "{backend}"
input [ {{ name: "X" data_type: TYPE_FP32 dims: [4] }} ]
output [ {outputs} ]
instance_group [ {{ kind: KIND_CPU }} ]
parameters: {{ key: "MOONPOOL_ENVIRONMENT" value: {{ string_value: "FAULT_*" }} }}
parameters: {{ key: "MOONPOOL_EXECUTE_TIMEOUT_S" value: {{ string_value: "3" }} }}
parameters: {{ key: "MOONPOOL_RESTART_WINDOW_S" value: {{ string_value: "0.001" }} }}
"""
OUTPUTS = {
    "rogue": '{ name: "Y" data_type: TYPE_FP32 dims: [-1] }, '
    '{ name: "STRINGS" data_type: TYPE_STRING dims: [-1] }',
    "sibling": '{ name: "OUT_X" data_type: TYPE_FP32 dims: [4] }',
}
# How the log tells of the end of a process: for a breach, for an end of its own, and for what is no answer.
ENDED = re.compile(r"broke the protocol and was ended: \w|is not healthy|took longer than 3 s")
# What harms nobody but its own requests.
BORNE = {"blocks that hold nothing", "strings that are none"}
X = np.arange(4, dtype=np.float32)


class SanitizedServer(TritonServer):
    """With a backend `rogue`, whose stubs misbehave, and an honest one, `moonpool`."""

    def _lay_out_backend(self) -> None:
        super()._lay_out_backend()
        made = library("address,undefined")
        for name in ("moonpool", "rogue"):
            installation.put(self._backends / name, name, made)
        settings = self._backends / "rogue" / installation.SETTINGS
        settings.write_text(f"{sys.executable}\n{ROGUE_LAUNCHER}\n")

    def _command(self) -> list[str]:
        return [*super()._command(), "--disable-auto-complete-config"]

    def _environment(self) -> dict[str, str]:
        return {
            **super()._environment(),
            "LD_PRELOAD": sanitizer_libraries(),
            # The server's own memory is not for us to answer for.
            "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:handle_segv=0",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        }


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SanitizedServer]:
    repository = tmp_path_factory.mktemp("hostile")
    for name, backend in (("rogue", "rogue"), ("sibling", "moonpool")):
        (repository / name / "1").mkdir(parents=True)
        config = CONFIG.format(backend=backend, outputs=OUTPUTS[name])
        (repository / name / "config.pbtxt").write_text(config)
        shutil.copy(MODELS / "echo.py", repository / name / "1" / "model.py")
    server = SanitizedServer(
        interpreter(), repository, tmp_path_factory.mktemp("server"), list(OUTPUTS)
    )
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
