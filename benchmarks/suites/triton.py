"""One real tritonserver, with the same models in its own Python backend and in moonpool's, pressed in turns."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from moonpool.benchmarks.hosts.kserve import TritonFiles
from moonpool.benchmarks.suites.figure import counted
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.peer.peer import Unavailable
from moonpool.benchmarks.suites.peer.presser import STREAM_CONFIG, Case, Shown, presser, report_in_turns, streams
from moonpool.benchmarks.suites.peer.served import Served, triton_python
from moonpool.benchmarks.suites.report import Report, main
from moonpool.runtime.triton import install

# The columns, and the backends of the models' configurations.
_SIDES = {"moonpool": "moonpool", "stock": "python"}
_INSTANCES = (1, 4)


def cases() -> dict[str, Case]:
    """Return the cases by their names in the table. A model's name ends with its number of instances."""
    found = {}
    pair = {"INPUT0": 4, "INPUT1": 4}
    for count in _INSTANCES:
        for protocol in ("http", "grpc"):
            for callers in (1, 4, 16):
                name = f"add_sub, {protocol.upper()}, {counted(callers, 'caller')}, {counted(count, 'instance')}"
                found[name] = Case(protocol, f"add_sub_{count}", "FP32", pair, True, callers, goal="at least 1.5")
    for size, elements, goal in (("1 MB", 1 << 20, "at least 1.3"), ("16 MB", 1 << 24, "at least 1.1")):
        for protocol in ("http", "grpc"):
            for callers in (1, 4):
                name = f"identity, {size}, {protocol.upper()}, {counted(callers, 'caller')}"
                shapes = {"INPUT0": elements}
                found[name] = Case(protocol, "identity_1", "UINT8", shapes, False, callers, goal=goal)
    return found | streams("stream_1")


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
        folder = self._files.repository / f"{model}_{instances}_{side}"
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(MODELS / model, folder, ignore=unwanted)
        config = (MODELS / model / "config.pbtxt").read_text()
        config = re.sub(r"\bcount: 1\b", f"count: {instances}", config)
        (folder / "config.pbtxt").write_text(_for(side, config))

    def _write_stream(self, side: str) -> None:
        folder = self._files.repository / f"stream_1_{side}"
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
        for name, case in cases().items():
            if quick and (case.callers != 4 or not case.model.endswith("_1")):
                continue
            sides = {side: (case._replace(model=f"{case.model}_{side}"), server) for side in _SIDES}
            shown = {
                "requests_per_s": Shown("", "requests/s", case.goal, True),
                "p50_us": Shown("p50, ", "µs"),
                "p99_us": Shown("p99, ", "µs", "at most 1"),
            }
            report_in_turns(report, name, pressed, sides, shown, quick=quick)
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
