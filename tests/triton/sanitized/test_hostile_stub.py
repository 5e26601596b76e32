"""Whatever a stub sends to the library inside tritonserver, the server stays up and says what was wrong.

The library is made with the sanitizers for addresses and for undefined behaviour, which end the server where it does
what it must not.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from tests.faults.contents import CONTROLS, channels, packets
from tests.faults.known import FAULTS
from tests.triton.answers import Answer, Outcome
from tests.triton.sanitized.server import ADDRESSES, LOG_LINES_PER_S, OUTPUTS, SanitizedServer, write_models
from tests.triton.triton_side import TritonSide
from tests.waiting import wait_until
from tritonclient.grpc import service_pb2, service_pb2_grpc

from moonpool.ipc.messages import Kind

# The first test waits for the compiler.
pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]
# The log has these words for the end of a process: for a violation of the protocol, for an end of its own, and for a
# missing answer.
ENDED = re.compile(r"broke the protocol and was ended: \w|is not healthy|took longer than")
X = np.arange(4, dtype=np.float32)
TIMES = 100
LINES_OF_AN_END = 3
REFUSALS_LOGGED = 16


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SanitizedServer]:
    repository = tmp_path_factory.mktemp("hostile")
    # One of the faults may be ended by nothing else, where the sanitizers slow down the server.
    write_models(repository, timeout_s=5)
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


def ask(side: TritonSide, fault: str = "", model: str = "rogue") -> Outcome:
    return side.infer(model, {"X": X}, request_id=fault)


@pytest.mark.promise(
    "The wire",
    "Whatever a stub sends to the library in tritonserver, on whichever channel, the server "
    "stays up, other models answer, the log says what was wrong, and another process serves.",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_stub_that_breaks_the_protocol_is_ended_and_the_server_stays(
    hostile: SanitizedServer, side: TritonSide, fault: str
) -> None:
    assert isinstance(ask(side), Answer)
    heard = len(hostile.log())

    ask(side, fault)

    # Only the log has the reason.
    wait_until(lambda: ENDED.search(hostile.log()[heard:]), 60.0, "a reason in the log")
    wait_until(lambda: isinstance(ask(side), Answer), 60.0, "another process")
    assert isinstance(side.infer("sibling", {"X": X}), Answer)


@pytest.mark.promise("Containment", "No message of a stub …")
@pytest.mark.parametrize("model", ["rogue", "confined"])
@pytest.mark.parametrize(("channel", "kind"), [pytest.param(*each, id=each[1].name) for each in channels()])
def test_strange_contents_end_the_stub_or_nothing_and_the_log_stays_small(
    hostile: SanitizedServer, side: TritonSide, model: str, channel: str, kind: Kind
) -> None:
    wait_until(lambda: isinstance(ask(side, "", model), Answer), 60.0, "an instance")
    heard, ends, begin_s = len(hostile.log()), 0, time.monotonic()

    for packet in packets(channel, kind):
        said = f"says {channel} {TIMES} {packet.hex()}"
        if not isinstance(ask(side, said, model), Answer):
            ends += 1
            wait_until(lambda: isinstance(ask(side, "", model), Answer), 60.0, "an instance")

    # Lines that a stub prints begin with its name. Another test limits how many there are.
    printed = f"[{model}_0_0]"
    lines = hostile.log()[heard:].split("\n")
    own = [line for line in lines if line and not line.startswith(printed)]
    if model == "rogue" and kind == Kind.LOAD_MODEL:
        # A model that is not contained may load any model. tritonserver itself writes a line about each unknown name.
        own = [line for line in own if "failed to poll model" not in line]
    may_log = 0.0
    if kind == Kind.LOG:
        # Each second allows so many messages, and one that counts those left out. Some messages have several lines.
        seconds = 2 + time.monotonic() - begin_s
        may_log = (LOG_LINES_PER_S + 1) * seconds * (1 + CONTROLS.count("\n"))
    if kind == Kind.DENIALS and model == "confined":
        # The log has a line for each of the first refusals of a process.
        may_log = REFUSALS_LOGGED * (ends + 1)
    assert len(own) <= LINES_OF_AN_END * ends + may_log, own
    assert not any("Traceback" in line for line in own)
    assert isinstance(side.infer("sibling", {"X": X}), Answer)


@pytest.mark.promise(
    "The wire",
    "Whatever metrics a stub asks for, by name, labels, buckets and values, the server stays up and shows its own.",
)
@pytest.mark.parametrize("number", range(15))
def test_metrics_of_all_kinds_and_values_leave_the_server_there(
    hostile: SanitizedServer, side: TritonSide, number: int
) -> None:
    ask(side, f"strange metrics {number}")

    with urllib.request.urlopen(f"http://127.0.0.1:{hostile.metrics_port}/metrics") as page:
        assert b"nv_inference_request_success" in page.read()
    wait_until(lambda: isinstance(ask(side), Answer), 60.0, "an instance")


@pytest.mark.promise(
    "The wire", "If a stub's calls name the same memory again and again, the runtime does not copy it without limit."
)
def test_strings_that_are_named_again_and_again_are_not_copied_without_end(side: TritonSide) -> None:
    said = ask(side, "a call of strings")

    assert "the strings in open requests of this model take 954204160 bytes already" in str(said)


@pytest.mark.promise("The wire", "If many clients leave at …")
def test_a_stub_that_is_behind_with_hearing_who_has_left_can_be_told_what_it_must(
    hostile: SanitizedServer, side: TritonSide
) -> None:
    heard = len(hostile.log())
    count = 400
    with grpc.insecure_channel(f"127.0.0.1:{hostile.grpc_port}") as channel:
        service = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        named = service_pb2.ModelStatisticsRequest(name="rogue")

        def executions() -> int:
            (found,) = service.ModelStatistics(named, timeout=60.0).model_stats
            return int(found.execution_count)

        before = executions()
        request = service_pb2.ModelInferRequest(model_name="rogue", id="leaves it open")
        request.inputs.add(name="X", datatype="FP32", shape=[4])
        request.raw_input_contents.append(X.tobytes())
        waiting = [service.ModelInfer.future(request) for _ in range(count)]
        wait_until(lambda: executions() == before + count, 60.0, "all to be left open")
        for each in waiting:
            each.cancel()

        said = ask(side, "ends the cancelled")

    assert f"{count} were cancelled" in str(said)
    assert not ENDED.search(hostile.log()[heard:])
