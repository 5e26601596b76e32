"""`moonpool serve` and a real Triton with the same models, pressed in turns over HTTP and gRPC."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from moonpool.benchmarks.suites.figure import counted
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.peer.presser import STREAM_CONFIG, Case, Shown, presser, report_in_turns, streams
from moonpool.benchmarks.suites.peer.served import both_servers
from moonpool.benchmarks.suites.report import Report, main

_MODELS = ("add_sub", "identity")
# The same with so many instances, and a decoupled model.
_INSTANCES = 8
_SEVERAL, _STREAM = f"add_sub_{_INSTANCES}", "stream"
_MANY = 256
_SIZES = {"1 MB": 1 << 20, "16 MB": 1 << 24}


def cases() -> dict[str, Case]:
    """Return the cases by their names in a table."""
    found = {}
    pair = {"INPUT0": 4, "INPUT1": 4}
    for protocol, goal in (("http", "at least 1.5"), ("grpc", "at least 1")):
        for callers in (1, 4, 16):
            name = f"add_sub, {protocol.upper()}, {counted(callers, 'caller')}"
            found[name] = Case(protocol, "add_sub", "FP32", pair, True, callers, goal=goal)
    for size, elements in (("4 B", 4), ("64 KB", 1 << 16)):
        shapes = {"INPUT0": elements}
        name = f"identity, {size}, HTTP, 1 caller"
        found[name] = Case("http", "identity", "UINT8", shapes, False, 1, goal="at least 1.3")
    for size, elements in _SIZES.items():
        for protocol in ("http", "grpc"):
            for where, goal in (("", ""), (", in shared memory", "at least 2")):
                name = f"identity, {size}{where}, {protocol.upper()}, 1 caller"
                shapes = {"INPUT0": elements}
                found[name] = Case(protocol, "identity", "UINT8", shapes, False, 1, bool(where), goal=goal)
    for protocol, goal in (("http", "at least 1.5"), ("grpc", "at least 1")):
        name = f"add_sub, {protocol.upper()}, 16 callers, {_INSTANCES} instances"
        found[name] = Case(protocol, _SEVERAL, "FP32", pair, True, 16)
        name = f"add_sub, {protocol.upper()}, {_MANY} connections"
        found[name] = Case(protocol, "add_sub", "FP32", pair, True, _MANY, goal=goal)
    return found | streams(_STREAM, "at least 3")


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


def measure(report: Report, quick: bool) -> None:
    """Each case with both servers in turns; the first round does not count."""
    pressed = presser()
    with contextlib.ExitStack() as stack:
        models = _write_models(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        servers = both_servers(report, stack, models)
        for name, case in cases().items():
            if not quick or case.callers == 4:
                sides = {server.name: (case, server) for server in servers}
                report_in_turns(report, name, pressed, sides, _shown(case), quick=quick)
    report.note(f"Servers, models and generator are on one machine; {pressed.words}.")
    report.note(
        f"Streams, and {_MANY} connections, are pressed by moonpool bench's generator; a request is a whole stream."
    )
    report.note("The same `model.py` and `config.pbtxt` in both; add_sub has dynamic batching.")
    report.note("Processor: time of all processes of a server for one answered request.")
    report.note("Ratios are moonpool's figure over Triton's of the same round.")


def _shown(case: Case) -> dict[str, Shown]:
    goal = "at most 1" if case.protocol == "http" and case.model == "add_sub" else ""
    return {
        "requests_per_s": Shown("", "requests/s", case.goal, True),
        "p50_us": Shown("p50, ", "µs", goal),
        "p99_us": Shown("p99, ", "µs", goal),
        "processor_us": Shown("processor, ", "µs"),
    }


if __name__ == "__main__":
    main("serve", "What does a client of moonpool serve get, and what of a real Triton?", measure)
