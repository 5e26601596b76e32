"""Runs a workload of `tests/models/gpu_workloads.py` in a process that puts on the sandbox of a plan, or a part of it.

    python -c PROGRAM SETTINGS      as `strict.py` does

Prints one JSON object a line: `listener`, the descriptor on which the kernel asks about calls; then `outcome`.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import json
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

from moonpool.ipc.policy import Policy
from moonpool.stub.sandbox import kernel, landlock, layers, seccomp

# The descriptor for `calls.c`, beyond those that a process has by itself.
CALLS_FD = 200
PROGRAM = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from tests.card.confined import main; main()"
_ERRNO, _KILL_PROCESS, _USER_NOTIF, _RETURN = 0x00050000, 0x80000000, 0x7FC00000, 0x06
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3


def _say(**values: Any) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")


def asking(program: bytes) -> bytes:
    """Return a filter that asks about the calls that this one refuses. Calls that it pretends are absent stay so."""
    instruction = struct.Struct("=HBBI")
    refusals = (_ERRNO | errno.EPERM, _KILL_PROCESS)
    return b"".join(
        instruction.pack(code, true, false, _USER_NOTIF if code == _RETURN and word in refusals else word)
        for code, true, false, word in instruction.iter_unpack(program)
    )


def _install_asking(program: bytes) -> None:
    changed = asking(program)
    code = ctypes.create_string_buffer(changed, len(changed))
    header = struct.pack("@HP", len(changed) // 8, ctypes.addressof(code))
    _say(listener=kernel.call("seccomp", _SET_MODE_FILTER, _NEW_LISTENER, header))


def _restrict_nothing(*_: object) -> None:
    """Stand in for Landlock: what files it would refuse is compared with its table."""


def _workload(path: str, name: str) -> Callable[[], None]:
    spec = importlib.util.spec_from_file_location("workloads", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[], None] = module.WORKLOADS[name]
    return found


def _mapped() -> list[str]:
    """Return the files that are mapped, libraries above all."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        paths = {line.split(maxsplit=5)[5].rstrip() for line in lines if line.count("/")}
    own = os.environ.get("LD_PRELOAD", "")
    return sorted(path for path in paths if path != own and os.path.isfile(path))


def main() -> None:
    """Put on what the settings say, run the workload, and say what came of it."""
    settings = json.loads(sys.argv[-1])
    workload = _workload(settings["path"], settings["workload"])
    try:
        if settings["policy"] is not None:
            if settings["how"] == "log":
                landlock.restrict = _restrict_nothing  # type: ignore[assignment]
                seccomp.install = _install_asking  # type: ignore[assignment]
            applied = layers.apply(Policy.from_json(settings["policy"]))
            if applied.left_out:
                _say(left_out=applied.left_out)
        libc = ctypes.CDLL(None)
        if hasattr(libc, "calls_begin"):
            libc.calls_begin()
        workload()
        if settings["how"] == "record":
            _say(mapped=_mapped())
    except Exception as error:
        _say(outcome=type(error).__name__, text=str(error))
    else:
        _say(outcome="works", text="")
    os._exit(0)
