"""A tritonserver in which the library was made with sanitizers, with a backend beside it whose stubs misbehave."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.e2e.hosting import MODELS
from tests.runtime.triton.library import library, sanitizer_libraries
from tests.triton.backend.hosting import HostingServer
from tests.triton.server import interpreter

from moonpool.runtime.triton import install

LOG_LINES_PER_S = 5
EXECUTE_TIMEOUT_S = 60
ROGUE_LAUNCHER = Path(__file__).parents[2] / "faults" / "rogue_launcher.py"
_CONFIG = """
backend: "{backend}"
input [ {{ name: "X" data_type: TYPE_FP32 dims: [4] }} ]
output [ {outputs} ]
instance_group [ {{ kind: KIND_CPU }} ]
parameters: {{ key: "MOONPOOL_ENVIRONMENT" value: {{ string_value: "FAULT_*" }} }}
parameters: {{ key: "MOONPOOL_EXECUTE_TIMEOUT_S" value: {{ string_value: "{timeout_s}" }} }}
parameters: {{ key: "MOONPOOL_RESTART_WINDOW_S" value: {{ string_value: "0.001" }} }}
parameters: {{ key: "MOONPOOL_LOG_LINES_PER_S" value: {{ string_value: "{lines}" }} }}
parameters: {{ key: "MOONPOOL_SANDBOX" value: {{ string_value: "{level}" }} }}
"""
_ROGUE = '{ name: "Y" data_type: TYPE_FP32 dims: [-1] }, { name: "STRINGS" data_type: TYPE_STRING dims: [-1] }'
OUTPUTS = {
    "rogue": _ROGUE,
    # This model is in a sandbox without grants.
    "confined": _ROGUE,
    "sibling": '{ name: "OUT_X" data_type: TYPE_FP32 dims: [4] }',
}


# The sanitizers are for the server and must not slow down its children.
START = """
import os, sys
del os.environ["LD_PRELOAD"]
os.execv(sys.executable, [sys.executable, "-I", {launcher!r}, *sys.argv[1:]])
"""


class Sanitizers(NamedTuple):
    """Sanitizers by the compiler's names, with the libraries and options to start the server with."""

    names: str
    libraries: tuple[str, ...]
    options: dict[str, str]


# These end the server at the library's first mistake.
ADDRESSES = Sanitizers(
    "address,undefined",
    ("libasan.so", "libubsan.so"),
    {
        # Mistakes in the server's own memory do not count.
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:handle_segv=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
)
# This sanitizer writes what it finds into the server's log. Races in the server's own code do not count.
THREADS = Sanitizers("thread", ("libtsan.so",), {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"})


class SanitizedServer(HostingServer):
    """Has the backend `moonpool`, and `rogue`, whose stubs misbehave."""

    def __init__(self, sanitizers: Sanitizers, repository: Path, folder: Path, models: Sequence[str]) -> None:
        super().__init__(interpreter(), repository, folder, models)
        self._sanitizers = sanitizers
        self._preloaded = sanitizer_libraries(sanitizers.libraries)
        self._folder = folder

    def lay_out_backend(self) -> None:
        super().lay_out_backend()
        made = library(self._sanitizers.names)
        for name, launcher in (("moonpool", install.LAUNCHER), ("rogue", ROGUE_LAUNCHER)):
            install.put(self._backends / name, name, made)
            start = self._folder / f"start_{name}.py"
            start.write_text(START.format(launcher=str(launcher)))
            settings = self._backends / name / install.SETTINGS
            settings.write_text(f"{sys.executable}\n{start}\n")

    def command(self) -> list[str]:
        return [*super().command(), "--disable-auto-complete-config"]

    def environment(self) -> dict[str, str]:
        preloaded = {"LD_PRELOAD": self._preloaded}
        return {**super().environment(), **self._sanitizers.options, **preloaded}


def config(outputs: str, backend: str = "moonpool", level: str = "standard", timeout_s: int = EXECUTE_TIMEOUT_S) -> str:
    """The configuration of a model with these outputs."""
    return _CONFIG.format(backend=backend, outputs=outputs, level=level, lines=LOG_LINES_PER_S, timeout_s=timeout_s)


def write_models(repository: Path, timeout_s: int = EXECUTE_TIMEOUT_S) -> None:
    """The models `rogue` and `confined`, and `sibling`, which is honest. A batch may take so many seconds."""
    for name, backend, level in (
        ("rogue", "rogue", "standard"),
        ("confined", "rogue", "strict"),
        ("sibling", "moonpool", "standard"),
    ):
        (repository / name / "1").mkdir(parents=True)
        text = config(OUTPUTS[name], backend, level, timeout_s)
        (repository / name / "config.pbtxt").write_text(text)
        shutil.copy(MODELS / "echo.py", repository / name / "1" / "model.py")
