"""The file of a measurement: `docs/BENCH.md` says what stands in it."""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import os
import platform
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.bench.comparison import matching, ratios
from moonpool.runtime.bench.split import PARTS
from moonpool.runtime.bench.window import PERCENTILES, percentile_us
from moonpool.runtime.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from moonpool.runtime.bench.sweep import Point
    from moonpool.runtime.bench.window import Window

# Grows when an older reader would misunderstand a file.
FORMAT = 1
# The endings of the files of one result.
SUFFIXES = (".json", ".csv", ".png")


class BadResult(MoonpoolError):
    """A file that is no result, or of another format."""

    code = "INVALID_ARG"


def result(about: Mapping[str, object], points: Sequence[Point]) -> dict[str, Any]:
    """`about` says what was measured: model, where, inputs and so on."""
    return {
        "format": FORMAT,
        "moonpool": VERSION,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about,
        "series": [
            {
                **point.load.as_dict(),
                "stable": point.stable,
                **_figures(point.whole),
                "windows": [_figures(window) for window in point.windows],
            }
            for point in points
        ],
    }


def _figures(window: Window) -> dict[str, object]:
    split = window.split
    figures: dict[str, object] = {
        "seconds": window.seconds,
        "requests": len(window.latencies_ns),
        "failed": window.failed,
        "requests_per_s": window.requests_per_s,
        "rows_per_batch": split.rows_per_execution if split else None,
        "latency_us": _times(window.latencies_ns),
        "generator_share": window.generator_share,
        "server": split.as_dict() if split else None,
    }
    if len(window.late_ns) or window.unsent:
        figures["delayed"] = window.delayed
        figures["unsent"] = window.unsent
    if len(window.first_ns):
        figures["responses"] = window.responses
        figures["responses_per_s"] = window.responses / window.seconds
        figures["first_response_us"] = _times(window.first_ns)
        figures["between_responses_us"] = _times(window.between_ns)
    return figures


def _times(times_ns: NDArray[np.int64]) -> dict[str, float | None]:
    times: dict[str, float | None] = {
        "mean": float(times_ns.mean()) / 1000 if len(times_ns) else None
    }
    for name, percentile in PERCENTILES.items():
        time_us = percentile_us(times_ns, percentile)
        # JSON has no NaN.
        times[name] = None if math.isnan(time_us) else time_us
    return times


def read(path: Path) -> dict[str, Any]:
    """A result that was written earlier. Raises `BadResult` and OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadResult(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("series"), list):
        raise BadResult(f"{path} is no result of `moonpool bench`: it has no `series`")
    if found.get("format") != FORMAT:
        raise BadResult(
            f"{path} is of format {found.get('format')!r}, and this version reads {FORMAT}; "
            "measure it anew"
        )
    if missing := _missing(found):
        raise BadResult(f"{path} is no result of `moonpool bench`: {missing}; measure it anew")
    return found


def _missing(found: Mapping[str, Any]) -> str | None:
    """Name a part of every result that a file lacks; None if it has all."""
    kinds = {"model": str, "where": str, "date": str, "inputs": dict}
    for name, kind in kinds.items():
        if not isinstance(found.get(name), kind):
            return f"it has no `{name}`"
    if not all(isinstance(each, list) and each for each in found["inputs"].values()):
        return "an entry of `inputs` is no list"
    if not isinstance(found.get("configuration_fields", {}), dict | None):
        return "`configuration_fields` is no object"
    for point in found["series"]:
        lacking = [name for name in _NEEDED if not isinstance(point, dict) or name not in point]
        if lacking:
            return f"a point of `series` has no `{lacking[0]}`"
    return None


# The fields of each point that tables and comparisons read.
_NEEDED = (
    "stable", "requests_per_s", "failed", "latency_us", "generator_share", "server", "windows",
)  # fmt: skip


def compare(found: dict[str, Any], *, in_turns: bool) -> None:
    """Add `ratios` to each point that has its like in `against`, if that is there."""
    if "against" not in found:
        return
    for point in found["series"]:
        other = matching(point, found["against"]["series"])
        if other is not None:
            compared = ratios(point["windows"], other["windows"], in_turns=in_turns)
            point["ratios"] = {name: ratio.as_dict() for name, ratio in compared.items()}


def check_free(folder: Path, name: str) -> None:
    """Raise `BadResult` if the folder has a result of that name already."""
    for suffix in SUFFIXES:
        path = folder / f"{name}{suffix}"
        if path.exists():
            raise BadResult(
                f"{path} is there already: tell this result from it by --label, or replace it by --overwrite"
            )


def write(
    folder: Path, name: str, found: Mapping[str, Any], *, overwrite: bool = False
) -> list[Path]:
    """NAME.json and NAME.csv in the folder, which is made; returns their paths. Raises OSError.

    Files that are there already are left alone, unless `overwrite`: then FileExistsError is raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {".json": json.dumps(found, indent=1) + "\n", ".csv": as_csv(found)}
    written = []
    for suffix, text in texts.items():
        path = folder / f"{name}{suffix}"
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
        written.append(path)
    return written


_COLUMNS = (
    "concurrency",
    "request_rate",
    "distribution",
    "stable",
    "seconds",
    "requests",
    "failed",
    "requests_per_s",
    "responses_per_s",
    "rows_per_batch",
    "delayed",
    "unsent",
    "generator_share",
)


def as_csv(found: Mapping[str, Any]) -> str:
    """A line for each load, the same figures as in `series`; what was not measured is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    times = ("latency_us", "first_response_us", "between_responses_us")
    names = ("mean", *PERCENTILES)
    heads = [f"{time.removesuffix('_us')}_{name}_us" for time in times for name in names]
    writer.writerow([*_COLUMNS, *heads, *(f"server_{part}_us" for part in PARTS)])
    for point in found["series"]:
        server = point["server"] or {}
        writer.writerow(
            [
                *(point.get(column) for column in _COLUMNS),
                *((point.get(time) or {}).get(name) for time in times for name in names),
                *(server.get(f"{part}_us") for part in PARTS),
            ]
        )
    return text.getvalue()
