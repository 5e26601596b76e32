"""Asks this card's driver by ctypes alone: a line for each question that the GPU's page leaves open.

    python -m tests.card.probe

Nothing of moonpool is imported, so an answer here is the driver's or the machine's. First come the questions whose
answers are times, one after the other; then all others, side by side. Each is a cell of its own (`cells.py`), so one
that hangs costs itself.
"""

from __future__ import annotations

import ast
import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.card import guises, results
from tests.card.cell import REFUSED, WORKS
from tests.card.cells import ROOT, Cell, Cells, keeper
from tests.card.facts import said

# CUdevice_attribute, what it is, and the value that moonpool relies on.
ATTRIBUTES: tuple[tuple[int, str, int | None], ...] = (
    (20, "compute mode", 0),
    (40, "copy engines", None),
    (41, "unified addressing", 1),
    (75, "compute capability, major", None),
    (76, "compute capability, minor", None),
    (88, "pageable memory access", None),
    (90, "compute preemption", None),
    (99, "host registration", 1),
    (102, "virtual memory", 1),
    (103, "handles by POSIX descriptor", 1),
    (107, "compressible memory", None),
    (110, "GPUDirect RDMA with virtual memory", None),
    (113, "host registration for reading only", None),
    (115, "memory pools", None),
    (119, "handle types of memory pools", None),
    (122, "64-bit stream memory operations", None),
    (123, "stream wait value NOR", None),
    (124, "DMA-BUF", None),
    (125, "legacy handles and events", 1),
    (126, "memory synchronization domains", None),
    (127, "tensor maps", None),
    (128, "fabric handles", None),
    (132, "multicast", None),
)
# What is expected of the ways to share memory, "" where any answer is one. Only a descriptor is what moonpool needs.
_OPENS: dict[str, dict[str, str]] = {
    "descriptor": {guise: "" if guise == guises.PIDS_ALONE else WORKS for guise in (guises.SAME, *guises.OTHERS)},
    "legacy handle": {
        guises.SAME: REFUSED,
        guises.CHILD: WORKS,
        guises.USER: REFUSED,
        guises.PIDS: REFUSED,
        guises.ALL: REFUSED,
    },
    "pool": {},
    "fabric": {},
}
_EVENTS = {guises.SAME: REFUSED, guises.CHILD: WORKS}
_LIVES = {"descriptor": WORKS, "legacy handle": "", "pool": ""}
_MOST_AT_ONCE = 16
# For what is left to do when time is up.
_RESERVE_S = 3.0


def functions() -> list[str]:
    """Return the names of the driver's functions that moonpool calls, from its source; none if it has no such table."""
    source = ast.parse((ROOT / "ipc/cuda/driver.py").read_text())
    return [
        key.value
        for node in source.body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "_FUNCTIONS"
        for key in getattr(node.value, "keys", [])
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    ]


def timed(share: float) -> Iterator[Cell]:
    """Yield the cells that need the card for themselves."""
    yield Cell("driver", "describe", {"attributes": ATTRIBUTES, "functions": functions()}, limit_s=15)
    is_card = share == 1
    sizes = [2 << 20, 1 << 30 if is_card else 4 << 20]
    for kind in ("descriptor", "legacy handle", "pool"):
        yield Cell(f"cost of a {kind}", "costs", {"kind": kind, "sizes": sizes})
    yield Cell("words in memory, child", "words", {"guise": guises.CHILD, "rounds": 200})
    yield Cell("pinned memory", "pins", {"size_bytes": 256 << 20 if is_card else 4 << 20})
    counts = [1, 4, 16] if is_card else [1, 2]
    yield Cell("context", "contexts", {"counts": counts}, limit_s=12)


def untimed(share: float) -> Iterator[Cell]:
    """Yield the cells that may run side by side, the longest first."""
    killed = {"busy_s": 5 * share, "looks_s": [each * share for each in (1, 5, 10)]}
    for at_once in (False, True):
        name = f"killed in a kernel, recorded anew {'at once' if at_once else 'in the end'}"
        yield Cell(name, "killed", {**killed, "at_once": at_once}, limit_s=20)
    yield Cell("killed before it writes a word", "killed_word", {"busy_s": 2 * share})
    yield from openings("descriptor")
    for guise in (guises.SAME, *guises.OTHERS):
        arguments = {"guise": guise, "expected": _EVENTS.get(guise, ""), "busy_s": 0.2}
        yield Cell(f"event, {guise}", "orders", arguments)
    for kind, expected in _LIVES.items():
        for how in ("freed", "killed"):
            arguments = {"kind": kind, "how": how, "expected": expected}
            yield Cell(f"{kind} whose maker has {'been ' * (how == 'killed')}{how}", "lives", arguments)
    for guise, expected in ((guises.CHILD, ""), (guises.USER, REFUSED), (guises.ALL, REFUSED)):
        yield Cell(f"descriptor that was not sent, {guise}", "stranger", {"guise": guise, "expected": expected})
    yield Cell("descriptor of something else", "guess")
    yield Cell(f"words in memory, {guises.ALL}", "words", {"guise": guises.ALL, "rounds": 5})
    for types, what in ((9, "descriptor and fabric"), (8, "fabric alone")):
        yield Cell(f"memory that can be exported by {what}", "create", {"types": types})
    yield Cell("fork", "forks")
    for kind in ("legacy handle", "pool", "fabric"):
        yield from openings(kind)


def openings(kind: str) -> Iterator[Cell]:
    """Yield the cells of one way to share memory."""
    expected, needed = _OPENS[kind], kind == "descriptor"
    for guise in (guises.SAME, *guises.OTHERS):
        arguments = {"kind": kind, "guise": guise, "expected": expected.get(guise, "")}
        yield Cell(f"{kind}, {guise}", "opens", {**arguments, "needed": needed})


def present() -> None:
    """Record which of the driver's services are here. None of them is asked to do anything."""
    names = set()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdecimal():
                names.add(Path(entry.path, "comm").read_text().strip())
    for what, begins in (
        ("MPS", "nvidia-cuda-mps"),
        ("fabric manager", "nv-fabricmanage"),
        ("persistence daemon", "nvidia-persiste"),
    ):
        found = sorted(name for name in names if name.startswith(begins))
        results.record(f"{what} runs", True, " ".join(found) or "no")
    nodes = sorted(str(path) for path in Path("/dev").glob("nvidia*"))
    nodes += sorted(str(path) for path in Path("/dev").glob("nvidia-caps*/*"))
    results.record("nodes in /dev", True, len(nodes), "nodes", text=" ".join(nodes))
    wanted = "mig.mode.current,compute_mode,persistence_mode,ecc.mode.current"
    command = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader"]
    status, words = said(command, timeout_s=5)
    if status == 0:
        results.record("modes", True, words, text=wanted)
    else:
        results.record("modes", None, text=words)


def main() -> None:
    """Ask all questions within the time that the runner gives."""
    try:
        _ask()
    except Exception as error:
        traceback.print_exc()
        results.record("probe", False, type(error).__name__, text=str(error))


def _ask() -> None:
    began, share = time.monotonic(), results.share()
    ends = began + results.limit_s() - _RESERVE_S
    present()
    cells = Cells(results.record, ends)
    with keeper(results.record):
        # If the card is slow, some of the times are left for later, as the other questions are more.
        left = cells.run(timed(share), at_once=1, until=began + (ends - began) / 2)
        cells.run(untimed(share), at_once=min(_MOST_AT_ONCE, 2 * (os.cpu_count() or 1)))
        cells.run(left, at_once=1)


if __name__ == "__main__":
    main()
