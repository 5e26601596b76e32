"""`moonpool serve` and a real Triton with the same models, pressed in turns over HTTP and gRPC."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.peer.peer import Unavailable
from moonpool.benchmarks.suites.peer.presser import (
    RESPONSES,
    STREAM_CONFIG,
    Case,
    Failed,
    Own,
    Presser,
    Shown,
    Streams,
    press_in_turns,
    presser,
    report_rows,
)
from moonpool.benchmarks.suites.peer.served import MoonpoolServed, Served, TritonServed
from moonpool.benchmarks.suites.report import Report, main

_MODELS = ("add_sub", "identity")
# The same with so many instances, and a decoupled model.
_INSTANCES = 8
_SEVERAL, _STREAM = f"add_sub_{_INSTANCES}", "stream"
_MANY = 256
_SMALL_SIZES = {"4 B": 4, "64 KB": 1 << 16}
_SIZES = {"1 MB": 1 << 20, "16 MB": 1 << 24}
_ROUNDS = 5
# Goals of the ratio of throughputs, by protocol, and with tensors in shared memory.
_GOALS = {"http": "at least 1.5", "grpc": "at least 1"}
_GOAL_SMALL = "at least 1.3"
_GOAL_SHARED = "at least 2"
_GOAL_STREAM = "at least 3"


def cases() -> dict[str, Case]:
    """Return the cases by their names in a table."""
    found = {}
    pair = {"INPUT0": 4, "INPUT1": 4}
    for protocol in ("http", "grpc"):
        for callers in (1, 4, 16):
            name = f"add_sub, {protocol.upper()}, {_callers(callers)}"
            found[name] = Case(protocol, "add_sub", "FP32", pair, True, callers)
    for size, elements in _SMALL_SIZES.items():
        name = f"identity, {size}, HTTP, 1 caller"
        found[name] = Case("http", "identity", "UINT8", {"INPUT0": elements}, False, 1)
    for size, elements in _SIZES.items():
        for protocol in ("http", "grpc"):
            for shared in (False, True):
                where = ", in shared memory" if shared else ""
                name = f"identity, {size}{where}, {protocol.upper()}, 1 caller"
                shapes = {"INPUT0": elements}
                found[name] = Case(protocol, "identity", "UINT8", shapes, False, 1, shared)
    for protocol in ("http", "grpc"):
        name = f"add_sub, {protocol.upper()}, 16 callers, {_INSTANCES} instances"
        found[name] = Case(protocol, _SEVERAL, "FP32", pair, True, 16)
        name = f"add_sub, {protocol.upper()}, {_MANY} connections"
        found[name] = Case(protocol, "add_sub", "FP32", pair, True, _MANY)
    for callers in (1, 4):
        name = f"stream of {RESPONSES} responses, GRPC, {_callers(callers)}"
        found[name] = Case("grpc", _STREAM, "INT32", {"X": 1}, False, callers)
    return found


def _write_models(folder: Path) -> tuple[str, ...]:
    """Write the models that are not as they lie in the tree, and return all by their names and folders."""
    several, stream = folder / _SEVERAL, folder / _STREAM
    shutil.copytree(MODELS / "add_sub", several, ignore=shutil.ignore_patterns("__pycache__"))
    config = several / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", f"count: {_INSTANCES}"))
    (stream / "1").mkdir(parents=True)
    shutil.copy(MODELS / "streaming.py", stream / "1" / "model.py")
    (stream / "config.pbtxt").write_text(STREAM_CONFIG)
    return (*_MODELS, f"{_SEVERAL}={several}", f"{_STREAM}={stream}")


def _by(pressed: Presser, case: Case) -> Presser:
    """Return the generator for a case. perf_analyzer has its callers share connections, and counts no streams."""
    if case.model == _STREAM:
        return Streams()
    return Own() if case.callers == _MANY else pressed


def _callers(count: int) -> str:
    return "1 caller" if count == 1 else f"{count} callers"


def measure(report: Report, quick: bool) -> None:
    """Each case with both servers in turns; the first round does not count."""
    pressed = presser()
    with contextlib.ExitStack() as stack:
        models = _write_models(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        servers: list[Served] = []
        for make in (MoonpoolServed, TritonServed):
            try:
                servers.append(make(models))
                stack.callback(servers[-1].close)
            except Unavailable as error:
                report.skipped(make.name, str(error))
        chosen = cases()
        if quick:
            chosen = {name: case for name, case in chosen.items() if case.callers == 4}
        for name, case in chosen.items():
            try:
                sides = {server.name: (case, server) for server in servers}
                found = press_in_turns(_by(pressed, case), sides, _ROUNDS, quick=quick)
            except Failed as error:
                report.skipped(name, str(error))
                continue
            report_rows(report, name, found, _shown(case))
    report.note(f"Servers, models and generator are on one machine; {pressed.words}.")
    report.note(
        f"Streams, and {_MANY} connections, are pressed by moonpool bench's generator; a request is a whole stream."
    )
    report.note("The same `model.py` and `config.pbtxt` in both; add_sub has dynamic batching.")
    report.note("Processor: time of all processes of a server for one answered request.")
    report.note("Ratios are moonpool's figure over Triton's of the same round.")


def _shown(case: Case) -> dict[str, Shown]:
    return {
        "requests_per_s": Shown("", "requests/s", _goal(case, "requests_per_s"), True),
        "p50_us": Shown("p50, ", "µs", _goal(case, "p50_us")),
        "p99_us": Shown("p99, ", "µs", _goal(case, "p99_us")),
        "processor_us": Shown("processor, ", "µs"),
    }


def _goal(case: Case, field: str) -> str:
    if field == "requests_per_s":
        if case.model == _STREAM:
            return _GOAL_STREAM
        if case.model == "add_sub":
            return _GOALS[case.protocol]
        if case.shapes["INPUT0"] in _SMALL_SIZES.values():
            return _GOAL_SMALL
        return _GOAL_SHARED if case.shared_memory else ""
    is_small_http = case.protocol == "http" and case.model == "add_sub"
    return "at most 1" if is_small_http and field in ("p50_us", "p99_us") else ""


if __name__ == "__main__":
    main("serve", "What does a client of moonpool serve get, and what of a real Triton?", measure)
