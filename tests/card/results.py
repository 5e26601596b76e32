"""Results of a machine with a card: one line of JSON each, on the disk the moment that something is known.

The runner and all stages add to `results.jsonl`, several at the same time, and each of them may be killed at any
moment. So a line is written by one call under the file's lock, and the next writer removes what a killed one has left
of a line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAME = "results.jsonl"
# The runner says by these where results go, which stage a process belongs to, when the whole began (on the monotonic
# clock), which part of its usual time a stage has (1 on a card), and after how many seconds it is killed.
RESULTS = "MOONPOOL_CARD_RESULTS"
STAGE = "MOONPOOL_CARD_STAGE"
BEGAN = "MOONPOOL_CARD_BEGAN"
SHARE = "MOONPOOL_CARD_SHARE"
LIMIT_S = "MOONPOOL_CARD_LIMIT_S"
# The stage of what the runner itself has to say, and of the first line of each run.
START = "start"
# No line is longer than a page of memory: the rest of a long text is in the log.
_MOST_TEXT = 1500
_MOST_NAME = 200


def share() -> float:
    """Return the part of its usual time that a stage has, at most 1."""
    return min(1.0, float(os.environ.get(SHARE) or 1))


def limit_s() -> float:
    """Return the seconds after which the runner kills this process, counted from its start."""
    return float(os.environ.get(LIMIT_S) or 60)


def record(
    name: str, ok: bool | None, value: float | str | None = None, unit: str = "", expected: str = "", text: str = ""
) -> None:
    """Add a result of this process's stage. `ok` is None for what was skipped or is not supported, which is no
    failure.
    """
    place = os.environ.get(RESULTS)
    if place is None:
        raise SystemExit(f"{RESULTS} does not name a folder; run: bash .ci/gpu FOLDER STAGE")
    began = float(os.environ.get(BEGAN) or time.monotonic())
    add(Path(place), os.environ.get(STAGE, ""), name, ok, value, unit, expected, text, began)


@contextlib.contextmanager
def recorded(name: str) -> Iterator[None]:
    """Record an error of the block as a failure of this name, and go on after the block."""
    try:
        yield
    except Exception as error:
        record(name, False, text=f"{type(error).__name__}: {error}")


def add(
    folder: Path,
    stage: str,
    name: str,
    ok: bool | None,
    value: float | str | None,
    unit: str,
    expected: str,
    text: str,
    began: float,
) -> None:
    """Write a line, and return when it is on the disk."""
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)
    line = {
        "stage": stage,
        "name": _cut(name, _MOST_NAME),
        # A truth of numpy's is none of JSON's, and a failure must be counted as one.
        "ok": None if ok is None else bool(ok),
        "value": _cut(value, _MOST_NAME) if isinstance(value, str) else value,
        "unit": unit,
        "expected": _cut(expected, _MOST_NAME),
        "text": _cut(text, _MOST_TEXT),
        "at_s": round(time.monotonic() - began, 3),
    }
    # What is no value of JSON's, as a number of numpy's, must not cost a stage its other results.
    written = json.dumps(line, allow_nan=False, default=str).encode() + b"\n"
    fd = os.open(folder / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        _remove_part_of_a_line(fd)
        if os.write(fd, written) < len(written):
            raise OSError(f"{folder / NAME} takes no more: is the disk full?")
        # A writer that the disk holds up must not hold up the others.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.fsync(fd)
    finally:
        os.close(fd)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]} …"


def _remove_part_of_a_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return
    whole = os.pread(fd, size, 0)
    os.ftruncate(fd, whole.rfind(b"\n") + 1)


def read(folder: Path) -> list[Mapping[str, Any]]:
    """Return all results of a folder in their order, without what a killed writer has left of a line."""
    try:
        text = (folder / NAME).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
