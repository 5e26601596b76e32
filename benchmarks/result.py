"""The result of a measurement: its files, its digests, and the comparison of two results. `docs/BENCH.md` describes
them.
"""

from __future__ import annotations

import csv
import datetime
import errno
import hashlib
import io
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool import MoonpoolError, __version__
from moonpool.benchmarks.comparison import confidence
from moonpool.benchmarks.loads import LOAD_FIELDS
from moonpool.benchmarks.slo import Slo
from moonpool.benchmarks.windows import PARTS, PERCENTILES, Point, Window, percentile_us
from moonpool.runtime.client.request import QuestionTensor
from moonpool.runtime.process.files import parsed_object

# Long enough that no two of a person's results agree by chance.
_LENGTH = 16


def digest_of_requests(inputs: Iterable[QuestionTensor]) -> str:
    """Compute a digest of the names, datatypes, shapes and bytes of a request's inputs."""
    digest = hashlib.sha256()
    for tensor in inputs:
        head = [tensor.name, tensor.datatype, list(tensor.shape), len(tensor.data)]
        digest.update(json.dumps(head).encode())
        digest.update(tensor.data)
    return digest.hexdigest()[:_LENGTH]


def digests_of_configuration(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Compute a digest of each field of a model's configuration, except its name and fields at their defaults.

    A server writes the same configuration differently over HTTP and gRPC, and may send fields at their defaults. So the
    configuration is first read as Triton's protobuf message. Raises ValueError if it does not fit that message.
    """
    from google.protobuf import json_format

    from moonpool.runtime.model.protobuf import config_messages

    message = config_messages().ModelConfig()
    try:
        json_format.ParseDict(dict(configuration), message, ignore_unknown_fields=True)
    except json_format.Error as error:
        raise ValueError(f"no configuration of a model: {error}") from error
    fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
    fields.pop("name", None)
    return {name: _of_json(value) for name, value in sorted(fields.items())}


def digest_of_fields(fields: Mapping[str, str]) -> str:
    """Compute one digest of all fields."""
    return _of_json(dict(fields))


def _of_json(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


class Incomparable(MoonpoolError):
    """Two results were measured with different requests."""

    code = "INVALID_ARG"


# The figures that are compared: a name, and the keys that lead to it in the figures of a window.
_COMPARED = {"requests_per_s": ("requests_per_s",), "p50": ("latency_us", "p50"), "p99": ("latency_us", "p99")}


def ratios(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], *, in_turns: bool
) -> dict[str, dict[str, float]]:
    """Compute ratios of rate, p50 and p99 of two lists of windows: their median, the smallest and the largest.

    Windows that were measured in turns are compared pair by pair, others each with the median of the other side. A
    figure that a side lacks is left out.
    """
    found = {}
    for name, path in _COMPARED.items():
        left, right = _values(ours, path), _values(theirs, path)
        if not in_turns and any(right):
            right = [statistics.median(value for value in right if value)] * len(left)
        quotients = [a / b for a, b in zip(left, right, strict=False) if a and b]
        if quotients:
            found[name] = {"median": statistics.median(quotients), "least": min(quotients), "most": max(quotients)}
    return found


def _values(windows: Sequence[Mapping[str, Any]], path: Sequence[str]) -> list[float | None]:
    values = []
    for window in windows:
        value: Any = window
        for name in path:
            value = value[name]
        values.append(value)
    return values


def matching(point: Mapping[str, Any], series: Sequence[Mapping[str, Any]]) -> Any:
    """Return the point of the series with the same load, if there is one."""
    for other in series:
        if all(point.get(key) == other.get(key) for key in LOAD_FIELDS):
            return other
    return None


# The circumstances of a measurement. Two results may differ in one on purpose.
_CIRCUMSTANCES = {
    "model": "the model",
    "model_version": "the version",
    "shared_memory": "shared memory",
    "streaming": "streaming",
    "json_tensors": "tensors as JSON",
    "openai": "endpoints of OpenAI's API",
    "sequences": "sequences",
    "cancel": "cancelled requests",
    "processes": "processes of the generator",
    "instances": "instances",
    "window_s": "seconds of a window",
    "machine": "the machine",
    "cores": "cores",
}


def check_requests(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> None:
    """Raise `Incomparable` unless both results have the same requests; `name` is the other result's."""
    here, there = ours["inputs"], theirs.get("inputs")
    if here != there:
        what = f"{described(there)} there, {described(here)} here"
    elif "requests_digest" in theirs and theirs["requests_digest"] != ours["requests_digest"]:
        what = f"{described(here)} with other values"
    else:
        return
    raise Incomparable(
        f"{name} was measured with other requests: {what}. Give the same --input, --shape and --batch, or measure it "
        "anew"
    )


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """List the circumstances in which two results differ, each in a few words."""
    found = [
        f"{words} ({_shown(ours[field])} and {_shown(theirs[field])})"
        for field, words in _CIRCUMSTANCES.items()
        if field in ours and field in theirs and ours[field] != theirs[field]
    ]
    if "requests_digest" not in theirs:
        found.append("maybe the values of the inputs, which the older file does not tell")
    here, there = ours.get("configuration_fields"), theirs.get("configuration_fields")
    if here is None or there is None:
        if here is not there or "configuration_fields" not in theirs:
            found.append("maybe the model's configuration, which one of them does not tell")
    elif here != there:
        fields = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        found.append(f"the model's configuration ({', '.join(fields)})")
    return found


def names(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, str]:
    """Name two results by their first difference: by label, address, a circumstance, or date."""
    if ours.get("label") or theirs.get("label"):
        left, right = (each.get("label") or each["where"] for each in (ours, theirs))
        if left != right:
            return left, right
    if ours["where"] != theirs["where"]:
        return ours["where"], theirs["where"]
    for field, words in _CIRCUMSTANCES.items():
        if ours.get(field) != theirs.get(field):
            return f"{words}: {_shown(ours.get(field))}", f"{words}: {_shown(theirs.get(field))}"
    return f"of {ours['date']}", f"of {theirs['date']}"


def _shown(value: object) -> str:
    """Show a value of `_CIRCUMSTANCES`."""
    return "the model's choice" if value in (None, "") else str(value)


def described(inputs: object) -> str:
    """Write inputs as `NAME DATATYPE [SHAPE]`, from the form in a result."""
    if not isinstance(inputs, dict) or not inputs:
        return "no inputs"
    return ", ".join(f"{name} {kind} {list(shape)}" for name, (kind, *shape) in inputs.items())


# For each figure, True if more is better.
_MORE_IS_BETTER = {"requests_per_s": True, "p50": False, "p99": False}


def verdict(name: str, ratio: Mapping[str, float]) -> str:
    """Return "better" or "worse" if all ratios of a figure are; otherwise "alike"."""
    if ratio["least"] <= 1 <= ratio["most"]:
        return "alike"
    return "better" if (ratio["least"] > 1) == _MORE_IS_BETTER[name] else "worse"


# The number of the format. It grows when an older version would misread a file.
FORMAT = 1
# The endings of the files of one result.
SUFFIXES = (".json", ".csv", ".png")


class BadResult(MoonpoolError):
    """A file is not a result, or has another format."""

    code = "INVALID_ARG"


def result(about: Mapping[str, object], points: Sequence[Point], slo: Slo | None = None) -> dict[str, Any]:
    """Make a result. `about` has the model, its address, inputs and so on; `slo` has limits to judge the points by."""
    if slo is not None:
        about = {**about, "slo": slo.as_dict(list(points))}
    return {
        "format": FORMAT,
        "moonpool": __version__,
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
                **_judged(point, slo),
                **_of_runs(point),
                "advice": None if point.advice is None else dict(point.advice),
                "windows": [_figures(window) for window in point.windows],
            }
            for point in points
        ],
    }


def _of_runs(point: Point) -> dict[str, object]:
    if not point.runs:
        return {}
    runs = [_figures(run.whole) for run in point.runs]
    return {"runs": runs, "confidence": confidence(runs)}


def _judged(point: Point, slo: Slo | None) -> dict[str, object]:
    if slo is None:
        return {}
    return {"goodput_per_s": slo.goodput_per_s(point.whole), "broken": slo.broken(point)}


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
    if window.resources is not None:
        figures["resources"] = window.resources.as_dict(len(window.latencies_ns), window.seconds)
    if window.cancelled:
        figures["cancelled"] = window.cancelled
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
    times: dict[str, float | None] = {"mean": float(times_ns.mean()) / 1000 if len(times_ns) else None}
    for name, percentile in PERCENTILES.items():
        time_us = percentile_us(times_ns, percentile)
        # JSON has no NaN.
        times[name] = None if math.isnan(time_us) else time_us
    return times


def read(path: Path) -> dict[str, Any]:
    """Read a result from its file. Raises `BadResult` and OSError."""
    try:
        found = parsed_object(path.read_bytes(), str(path))
    except ValueError as error:
        raise BadResult(str(error)) from error
    if not isinstance(found.get("series"), list):
        raise BadResult(f"{path} is not a result of `moonpool bench`: it has no `series`")
    if found.get("format") != FORMAT:
        raise BadResult(
            f"{path} is of format {found.get('format')!r}, and this version reads {FORMAT}; measure it anew"
        )
    if missing := _missing(found):
        raise BadResult(f"{path} is not a result of `moonpool bench`: {missing}; measure it anew")
    return found


def _missing(found: Mapping[str, Any]) -> str | None:
    """Name a part of every result that a file lacks; None if it has all."""
    kinds = {"model": str, "where": str, "date": str, "inputs": dict}
    for name, kind in kinds.items():
        if not isinstance(found.get(name), kind):
            return f"it has no `{name}`"
    if not all(isinstance(each, list) and each for each in found["inputs"].values()):
        return "an entry of `inputs` is not a list"
    if not isinstance(found.get("configuration_fields", {}), dict | None):
        return "`configuration_fields` is not an object"
    for point in found["series"]:
        lacking = [name for name in _NEEDED if not isinstance(point, dict) or name not in point]
        if lacking:
            return f"a point of `series` has no `{lacking[0]}`"
        advice = point.get("advice") or {"text": "", "line": ""}
        if not isinstance(advice, dict) or not {"text", "line"} <= advice.keys():
            return "the `advice` of a point has no `text` or no `line`"
    return None


# The fields of each point that tables and comparisons read.
_NEEDED = (
    "stable", "requests_per_s", "failed", "latency_us", "generator_share", "server", "windows",
)  # fmt: skip


def compare(found: dict[str, Any], *, in_turns: bool) -> None:
    """Add `ratios` to each point for which `against` has a point of the same load."""
    if "against" not in found:
        return
    for point in found["series"]:
        other = matching(point, found["against"]["series"])
        if other is not None:
            point["ratios"] = ratios(point["windows"], other["windows"], in_turns=in_turns)


def over(found: dict[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with `ratios` over another one that was measured in turns with it, and the name of that one as
    `over`.
    """
    compared = {**found, "against": first, "over": first["where"]}
    compare(compared, in_turns=True)
    del compared["against"]
    return compared


def others_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the results of other levels of the sandbox, or of other hosts, that were measured in turns with this
    one.
    """
    others: list[dict[str, Any]] = found.get("isolation") or found.get("hosts") or []
    return others


def check_free(folder: Path, name: str, more: Sequence[str] = (), *, overwrite: bool = False) -> None:
    """Make the folder, and raise `BadResult` if it has a result of that name already, unless `overwrite` is true.

    `more` are endings beside the usual ones. Raises `OSError` if nothing can be written there, before the measurement.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    for suffix in () if overwrite else (*SUFFIXES, *more):
        path = folder / f"{name}{suffix}"
        if path.exists():
            raise BadResult(
                f"{path} exists already: give this result a name by --label, or replace the old one by --overwrite"
            )


def write(folder: Path, name: str, found: Mapping[str, Any], *, overwrite: bool = False) -> list[Path]:
    """Write NAME.json and NAME.csv to the folder, which is made if needed; return their paths. Raises OSError.

    Raises FileExistsError if a file exists, unless `overwrite` is true.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {".json": json.dumps(found, indent=1) + "\n", ".csv": as_csv(found)}
    written = []
    for suffix, text in texts.items():
        path = folder / f"{name}{suffix}"
        try:
            with path.open("w" if overwrite else "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            error.filename = str(path)  # a full disk's error has none
            raise
        written.append(path)
    return written


_COLUMNS = (
    *LOAD_FIELDS,
    "stable",
    "seconds",
    "requests",
    "failed",
    "cancelled",
    "requests_per_s",
    "goodput_per_s",
    "broken",
    "responses_per_s",
    "rows_per_batch",
    "delayed",
    "unsent",
    "generator_share",
)


def as_csv(found: Mapping[str, Any]) -> str:
    """Write one line for each load, with the figures of `series`. Figures that were not measured are empty."""
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
