"""One real tritonserver, with the same models in its own Python backend and in moonpool's, pressed in turns."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from moonpool.benchmarks.hosts.kserve import TritonFiles
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.peer.peer import Unavailable
from moonpool.benchmarks.suites.peer.presser import (
    RESPONSES,
    STREAM_CONFIG,
    Case,
    Failed,
    Shown,
    Streams,
    press_in_turns,
    presser,
    report_rows,
)
from moonpool.benchmarks.suites.peer.served import Served, triton_python
from moonpool.benchmarks.suites.report import Report, main
from moonpool.runtime.triton import install

# The columns, and the backends of the models' configurations.
_SIDES = {"moonpool": "moonpool", "stock": "python"}
_INSTANCES = (1, 4)
_SIZES = {"1 MB": 1 << 20, "16 MB": 1 << 24}
_ROUNDS = 5


class Asked(NamedTuple):
    """One row of the table: its case, the number of instances, and the goal of its throughput."""

    case: Case
    instances: int
    goal: str
    is_stream: bool = False

    def of(self, side: str) -> Case:
        """The case with the model of that side."""
        return self.case._replace(model=_named(self.case.model, self.instances, side))


def cases() -> dict[str, Asked]:
    """Return the cases by their names in the table."""
    found = {}
    pair = {"INPUT0": 4, "INPUT1": 4}
    for instances in _INSTANCES:
        for protocol in ("http", "grpc"):
            for callers in (1, 4, 16):
                name = f"add_sub, {protocol.upper()}, {_counted(callers, 'caller')}, {_counted(instances, 'instance')}"
                case = Case(protocol, "add_sub", "FP32", pair, True, callers)
                found[name] = Asked(case, instances, "at least 1.5")
    for (size, elements), goal in zip(_SIZES.items(), ("at least 1.3", "at least 1.1"), strict=True):
        for protocol in ("http", "grpc"):
            for callers in (1, 4):
                name = f"identity, {size}, {protocol.upper()}, {_counted(callers, 'caller')}"
                case = Case(protocol, "identity", "UINT8", {"INPUT0": elements}, False, callers)
                found[name] = Asked(case, 1, goal)
    for callers in (1, 4):
        name = f"stream of {RESPONSES} responses, gRPC, {_counted(callers, 'caller')}"
        case = Case("grpc", "stream", "INT32", {"X": 1}, False, callers)
        found[name] = Asked(case, 1, "", is_stream=True)
    return found


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _named(model: str, instances: int, side: str) -> str:
    return f"{model}_{instances}_{side}"


class BothBackends(Served):
    """tritonserver with every model in both of its Python backends."""

    name = "tritonserver"

    def __init__(self) -> None:
        library = _library()
        self._files = TritonFiles(triton_python(), {})
        try:
            install.install(self._files.backends, library)
            for side in _SIDES:
                for instances in _INSTANCES:
                    self._write("add_sub", instances, side)
                self._write("identity", 1, side)
                self._write_stream(side)
            super().__init__(
                [
                    self._files.server,
                    f"--model-repository={self._files.repository}",
                    f"--backend-directory={self._files.backends}",
                    "--log-info=false",
                    "--log-warning=false",
                ],
                self._files.environment(),
                self._files.folder / "log",
            )
        except BaseException:
            self._files.remove()
            raise

    def _write(self, model: str, instances: int, side: str) -> None:
        folder = self._files.repository / _named(model, instances, side)
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(MODELS / model, folder, ignore=unwanted)
        config = (MODELS / model / "config.pbtxt").read_text()
        config = re.sub(r"\bcount: 1\b", f"count: {instances}", config)
        (folder / "config.pbtxt").write_text(_for(side, config))

    def _write_stream(self, side: str) -> None:
        folder = self._files.repository / _named("stream", 1, side)
        (folder / "1").mkdir(parents=True)
        shutil.copy(MODELS / "streaming.py", folder / "1" / "model.py")
        (folder / "config.pbtxt").write_text(_for(side, STREAM_CONFIG))

    def close(self) -> None:
        super().close()
        self._files.remove()


def _for(side: str, config: str) -> str:
    return config.replace('backend: "python"', f'backend: "{_SIDES[side]}"')


def _library() -> Path:
    try:
        return install.find_library()
    except install.NotInstallable as error:
        raise Unavailable(str(error)) from error


def measure(report: Report, quick: bool) -> None:
    """Each case on both sides in turns; the first round does not count."""
    try:
        server = BothBackends()
    except Unavailable as error:
        report.skipped("tritonserver", str(error))
        return
    pressed = presser()
    with contextlib.closing(server):
        chosen = cases()
        if quick:
            chosen = {name: asked for name, asked in chosen.items() if asked.case.callers == 4 and asked.instances == 1}
        for name, asked in chosen.items():
            by = Streams() if asked.is_stream else pressed
            try:
                sides = {side: (asked.of(side), server) for side in _SIDES}
                found = press_in_turns(by, sides, _ROUNDS, quick=quick)
            except Failed as error:
                report.skipped(name, str(error))
                continue
            shown = {
                "requests_per_s": Shown("", "requests/s", asked.goal, True),
                "p50_us": Shown("p50, ", "µs"),
                "p99_us": Shown("p99, ", "µs", "at most 1"),
            }
            report_rows(report, name, found, shown)
    report.note(f"Server, models and generator are on one machine; {pressed.words}.")
    report.note("Streams are pressed by moonpool bench's generator; a request is a whole stream.")
    report.note("The same `model.py` on both sides; add_sub has dynamic batching.")
    report.note("Ratios are moonpool's figure over the stock backend's of the same round.")


if __name__ == "__main__":
    main(
        "triton",
        "Inside a real Triton, what do its clients get of models in moonpool, and of the stock backend?",
        measure,
    )
