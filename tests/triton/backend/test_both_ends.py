"""A hostile stub has the same outcome at both ends: the runtime, and the library in a tritonserver.

The stub is `tests/faults/misbehave.py` at both. It does what the id of a request names. What either end makes of it is
in the error of that request, in the log, and in what the other models answer.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.faults.known import FAULTS, MISBEHAVE, WORDS
from tests.inside import boot_with
from tests.triton.backend.hosting import Client, HostingServer
from tests.triton.sanitized.server import (
    EXECUTE_TIMEOUT_S,
    LOG_LINES_PER_S,
    OUTPUTS,
    ROGUE_LAUNCHER,
    config,
    write_models,
)
from tests.triton.server import interpreter
from tests.waiting import wait_until
from tritonclient.grpc import InferRequestedOutput
from tritonclient.utils import InferenceServerException

import moonpool
from moonpool.runtime.log import flush
from moonpool.runtime.triton import install

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.promise(
        "Containment",
        "The runtime and the library in a tritonserver have the same budgets for a stub, and "
        "charge the same for each message: for its kind and its size, and double if they read "
        "it twice. All channels of a stub share one budget. Each observation of a metric and "
        "each line that a model logs count, too. A stub that is over budget pays for all "
        "messages that it has sent.",
    ),
]
X = np.zeros(4, np.float32)
SIGNATURE: Config = {
    "input": [tensor("X", "FP32", 4)],
    "output": [tensor("Y", "FP32", -1), tensor("STRINGS", "STRING", -1)],
}
BROKE = "broke the protocol and was ended: "
# The library has other words than `WORDS` for this. An empty packet is the end of a channel to both, and the stub that
# sent it waits for the next batch. The runtime waits for its end, and then ends it. The library shuts all of its
# channels, so it ends by itself.
OF_THE_LIBRARY = {"an empty packet": "exited with 0 during execute"}
# The client gets these errors in the response, or from the server, before the stub is ended.
TOLD_BEFORE = {
    "strings that are none": "output 'STRINGS' does not hold the strings of its shape",
    "strings without a byte": "output 'STRINGS' does not hold the strings of its shape",
    "responds twice": "expected a single response, got 2",
}

# Each of these sends more than the runtime reads in a second: messages, bytes in memory, or questions that cost more
# than their size, on one channel or on two. It takes at least so many seconds.
PACED = {
    "tells much": 1.0,
    "stores much": 1.0,
    "stores small": 3.9,
    "asks much": 1.0,
    "tells and asks": 3.5,
    "observes much": 1.0,
}


class End(Protocol):
    """The runtime's side of a stub: Python's or the native one."""

    def ask(self, model: str, fault: str = "") -> str:
        """Ask a model for what the request's id names; returns the error, "" where there is none."""
        ...

    def log(self) -> str:
        """Return the log so far."""
        ...


class RogueServer(HostingServer):
    """Has a backend beside `moonpool` whose stubs misbehave."""

    def lay_out_backend(self) -> None:
        super().lay_out_backend()
        rogue = self._backends / "rogue"
        shutil.copytree(self._backends / "moonpool", rogue)
        (library,) = rogue.glob("*.so")
        library.rename(rogue / "libtriton_rogue.so")
        (rogue / install.SETTINGS).write_text(f"{sys.executable}\n{ROGUE_LAUNCHER}\n")

    def command(self) -> list[str]:
        return [*super().command(), "--disable-auto-complete-config"]


class Library:
    """The library, in a tritonserver."""

    def __init__(self, server: RogueServer) -> None:
        self._server = server
        self._client = Client(server)

    def ask(self, model: str, fault: str = "") -> str:
        wanted = [InferRequestedOutput("Y" if model in ("rogue", "confined") else "OUT_X")]
        try:
            self._client.infer(model, X, request_id=fault, outputs=wanted)
        except InferenceServerException as error:
            return str(error.message())
        return ""

    def log(self) -> str:
        return self._server.log()

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def tritonserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    repository = tmp_path_factory.mktemp("rogues")
    write_models(repository)
    (repository / "talkative" / "1").mkdir(parents=True)
    (repository / "talkative" / "config.pbtxt").write_text(config(OUTPUTS["sibling"]))
    shutil.copy(MODELS / "talkative.py", repository / "talkative" / "1" / "model.py")
    folder = tmp_path_factory.mktemp("server")
    server = RogueServer(interpreter(), repository, folder, [*OUTPUTS, "talkative"])
    server.start()
    library = Library(server)
    yield library
    library.close()
    server.stop()


class Log(logging.Handler):
    """Keeps the texts of all records."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Python:
    """The runtime, in this process."""

    def __init__(self, runtime: moonpool.Runtime, log: Log) -> None:
        self._runtime = runtime
        self._log = log

    def ask(self, model: str, fault: str = "") -> str:
        try:
            self._runtime.infer(model, {"X": X}, request_id=fault, timeout_s=60.0)
        except moonpool.MoonpoolError as error:
            return str(error)
        return ""

    def log(self) -> str:
        flush()
        return "\n".join(self._log.lines)


@pytest.fixture(scope="module")
def runtime() -> Iterator[End]:
    log = Log()
    logger = logging.getLogger("moonpool")
    logger.addHandler(log)
    level = logger.level
    logger.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch, moonpool.Runtime() as runtime:
        sibling: Config = {"input": SIGNATURE["input"], "output": [tensor("OUT_X", "FP32", 4)]}
        runtime.load("sibling", MODELS / "echo.py", config=sibling | options())
        runtime.load("talkative", MODELS / "talkative.py", config=sibling | options())
        boot_with(MISBEHAVE, patch)
        for name, sandbox in (("rogue", "standard"), ("confined", "strict")):
            seen = {
                "SANDBOX": sandbox,
                "ENVIRONMENT": "FAULT_*",
                "EXECUTE_TIMEOUT_S": EXECUTE_TIMEOUT_S,
                "RESTART_WINDOW_S": 0.001,
                "LOG_LINES_PER_S": LOG_LINES_PER_S,
            }
            runtime.load(name, MODELS / "echo.py", config=SIGNATURE | options(**seen))
        yield Python(runtime, log)
    logger.setLevel(level)
    logger.removeHandler(log)


@pytest.fixture(params=["runtime", "tritonserver"])
def end(request: pytest.FixtureRequest) -> Iterator[End]:
    end: End = request.getfixturevalue(request.param)
    yield end
    assert end.ask("sibling") == ""


@pytest.mark.promise(
    "The wire", "A stub that sends more than a model needs is read more slowly, also in a tritonserver."
)
@pytest.mark.parametrize(("fault", "least_s"), PACED.items(), ids=list(PACED))
def test_a_stub_over_its_budget_is_read_more_slowly(end: End, fault: str, least_s: float) -> None:
    assert end.ask("rogue") == ""

    def took_s() -> float:
        begin_s = time.monotonic()
        assert end.ask("rogue", fault) == ""
        return time.monotonic() - begin_s

    first_s = took_s()
    assert first_s > least_s
    # A busy machine may delay it, but not ten times in a row.
    assert first_s < 8.0 or any(took_s() < 8.0 for _ in range(9))


@pytest.mark.promise("The sandbox: `standard`", "The first message …")
@pytest.mark.promise(
    "Containment",
    "A stub that breaks the protocol in any way is ended. The log says why, in the same words in the "
    "runtime and in a tritonserver.",
)
@pytest.mark.promise("Containment", "The runtime reads the beginning of …")
@pytest.mark.promise("What a stub says", "A message that would unpack to …")
@pytest.mark.promise(
    "What a stub says",
    "A layout has no more outputs than the batch that it answers, and names blocks only for outputs that lie in them.",
)
@pytest.mark.promise("Responses at any time", "A stub that lies about responses is ended.")
@pytest.mark.promise(
    "Requests between models",
    "A stub that lies about its calls, or floods the runtime with them, is ended with a reason.",
)
@pytest.mark.promise("Seeing sandboxes", "A stub cannot forge lines, fill …")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_stub_that_breaks_the_protocol_is_ended_with_the_same_reason(end: End, fault: str) -> None:
    assert end.ask("rogue") == ""
    heard = len(end.log())

    said = end.ask("rogue", fault)

    words = WORDS.get(fault, BROKE)
    if isinstance(end, Library):
        words = OF_THE_LIBRARY.get(fault, words)
        assert said == TOLD_BEFORE.get(fault, said)
    assert fault in TOLD_BEFORE or re.match(r"Stub process 'rogue_0(_0)?' ", said)
    wait_until(lambda: words in end.log()[heard:], what=f"{words!r} in the log")
    wait_until(lambda: end.ask("rogue") == "", what="another process")


def test_every_fault_that_has_words_is_a_fault() -> None:
    assert len(FAULTS) > 40
    assert set(WORDS) <= set(FAULTS)


def test_each_line_of_a_message_of_a_log_counts(end: End) -> None:
    assert end.ask("rogue") == ""
    heard = len(end.log())

    assert end.ask("rogue", "logs many lines") == ""

    # The budget of saved lines allows so many.
    wait_until(lambda: "one of many" in end.log()[heard:])
    assert end.log()[heard:].count("one of many") <= 2 * LOG_LINES_PER_S


@pytest.mark.promise(
    "Containment",
    "An answer that has more than 64 MiB beside its outputs is an error of each request in it, "
    "and the instance lives on.",
)
def test_an_answer_that_is_too_large_beside_its_outputs_is_an_error_of_its_requests(end: End) -> None:
    process = end.ask("talkative", "pid")

    assert "beside its tensors; 67108864 is the most" in end.ask("talkative", str(65 << 20))

    assert end.ask("talkative", "1000") == ""
    assert end.ask("talkative", "pid") == process


def test_loads_that_are_not_granted_are_answered_alike(runtime: End, tritonserver: End) -> None:
    said = [end.ask("confined", "loads much") for end in (runtime, tritonserver)]

    assert "1 to 40: [" in said[0]
    assert "MOONPOOL_SANDBOX_MODELS" in said[0]
    assert re.sub(r"^\[[^]]*\] ", "", said[1]) == said[0]
