"""A hostile stub has the same outcome at both ends: the runtime, and the library in a tritonserver."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.faults.known import MISBEHAVE
from tests.triton.backend.hosting import Client, HostingServer
from tests.triton.sanitized.server import OUTPUTS, ROGUE_LAUNCHER, write_models
from tests.triton.server import interpreter
from tests.waiting import wait_until
from tritonclient.grpc import InferRequestedOutput
from tritonclient.utils import InferenceServerException

import moonpool
from moonpool.runtime import process
from moonpool.runtime.triton import installation

pytestmark = pytest.mark.timeout(300)
X = np.zeros(4, np.float32)
SIGNATURE: Config = {
    "input": [tensor("X", "FP32", 4)],
    "output": [tensor("Y", "FP32", -1), tensor("STRINGS", "STRING", -1)],
}
# Asks a model for what its request's id names; returns the error, "" where there is none.
Ask = Callable[[str, str], str]

# More than is heard in a second: messages, bytes in memory, and questions that cost more than they say.
PACED = ["tells much", "stores much", "asks much"]
LIES = [
    "a call that is open",
    "a call that is too large",
    "a notice that is too large",
    "an answer that is too large",
    "a word of what is let go of that lies in memory",
    "an indirect call in an indirect one",
    "floods growth",
    "floods calls",
]


class RogueServer(HostingServer):
    """Has a backend beside `moonpool` whose stubs misbehave."""

    def _lay_out_backend(self) -> None:
        super()._lay_out_backend()
        rogue = self._backends / "rogue"
        shutil.copytree(self._backends / "moonpool", rogue)
        (library,) = rogue.glob("*.so")
        library.rename(rogue / "libtriton_rogue.so")
        (rogue / installation.SETTINGS).write_text(f"{sys.executable}\n{ROGUE_LAUNCHER}\n")

    def _command(self) -> list[str]:
        return [*super()._command(), "--disable-auto-complete-config"]


@pytest.fixture(scope="module")
def tritonserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    repository = tmp_path_factory.mktemp("rogues")
    write_models(repository)
    folder = tmp_path_factory.mktemp("server")
    server = RogueServer(interpreter(), repository, folder, list(OUTPUTS))
    server.start()
    client = Client(server)

    def ask(model: str, fault: str) -> str:
        try:
            wanted = [InferRequestedOutput("Y")]
            client.infer(model, X, request_id=fault, outputs=wanted)
        except InferenceServerException as error:
            return str(error.message())
        return ""

    yield ask
    client.close()
    server.stop()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Ask]:
    with pytest.MonkeyPatch.context() as patch, moonpool.Runtime() as runtime:
        patch.setenv("FAULT_BOOT", process._BOOT)
        patch.setattr(process, "_BOOT", str(MISBEHAVE))
        for name, level in (("rogue", "standard"), ("confined", "strict")):
            seen = {"SANDBOX": level, "ENVIRONMENT": "FAULT_*", "RESTART_WINDOW_S": 0.001}
            config = SIGNATURE | options(**seen)
            runtime.load(name, MODELS / "echo.py", config=config)

        def ask(model: str, fault: str) -> str:
            try:
                runtime.infer(model, {"X": X}, request_id=fault, timeout_s=60.0)
            except moonpool.MoonpoolError as error:
                return str(error)
            return ""

        yield ask


@pytest.fixture(params=["runtime", "tritonserver"])
def end(request: pytest.FixtureRequest) -> Ask:
    ask: Ask = request.getfixturevalue(request.param)
    return ask


@pytest.mark.parametrize("fault", PACED)
def test_who_says_much_is_heard_more_slowly(end: Ask, fault: str) -> None:
    assert end("rogue", "") == ""
    begin_s = time.monotonic()

    assert end("rogue", fault) == ""

    assert 1.0 < time.monotonic() - begin_s < 8.0


@pytest.mark.parametrize("fault", LIES)
def test_who_lies_is_ended(end: Ask, fault: str) -> None:
    assert end("rogue", "") == ""

    assert re.search("broke the protocol|not healthy|took longer", end("rogue", fault))

    wait_until(lambda: end("rogue", "") == "", what="another process")


def test_loads_that_are_not_granted_are_answered_alike(runtime: Ask, tritonserver: Ask) -> None:
    said = [end("confined", "loads much") for end in (runtime, tritonserver)]

    assert "1 to 40: [" in said[0]
    assert "MOONPOOL_SANDBOX_MODELS" in said[0]
    assert re.sub(r"^\[[^]]*\] ", "", said[1]) == said[0]
