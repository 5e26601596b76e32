"""The overview of a server as lines of text for a terminal of some width."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from moonpool.runtime.cli.table import figure
from moonpool.runtime.output import harmless

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Shown = Mapping[str, Any]

_TITLES = ("STATE", "INST", "REQ/S", "LATENCY", "QUEUE", "FAILED", "RST", "MEMORY")
_ALIGN = "<>>>>>>>"
_WIDTHS = (11, 5, 7, 7, 5, 6, 3, 8)
_LEAST_NAME = 12
_MOST_ERRORS = 8
_USUAL_LEVEL = "standard"
_STYLES = {"READY": "", "FAILED": "red", "UNAVAILABLE": "dim", "STOPPED": "dim"}


class Line(NamedTuple):
    """A line without its end; `style` is one of `Terminal.paint` or ""."""

    text: str
    style: str = ""


def overview_lines(shown: Shown, url: str, width: int, *, instances: bool = True) -> list[Line]:
    """Everything, none of it wider than `width`. What models said is harmless to a terminal."""
    lines = [
        *_head(shown, url),
        Line(""),
        *_table(shown["models"], width, instances=instances),
        Line(""),
        *_errors(shown["errors"]),
    ]
    return [Line(cut(line.text, width), line.style) for line in lines]


def cut(text: str, width: int) -> str:
    """One line of text that takes no more than so many columns."""
    text = harmless(text).replace("\t", " ")
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _head(shown: Shown, url: str) -> list[Line]:
    server, models = shown["server"], shown["models"]
    recent = [model["recent"] for model in models if "recent" in model]
    ready = sum(model["state"] == "READY" and not model["reason"] for model in models)
    processes = [i for model in models for i in model["instances"] if i["pid"] is not None]
    memory = sum(instance["rss_bytes"] or 0 for instance in processes)
    rate = sum(each["requests_per_s"] for each in recent)
    queued = sum(model.get("queued", 0) for model in models)
    return [
        Line(
            f"moonpool {server['version']} at {url}, up {_span(server['uptime_s'])}, "
            f"pid {server['pid']}",
            "bold",
        ),
        Line(
            f"{ready} of {_plural(len(models), 'version')} ready, "
            f"{_plural(len(processes), 'process', 'processes')} with {_size(memory)}, "
            f"{figure(rate)} requests/s, {queued} queued"
        ),
    ]


def _table(models: Sequence[Shown], width: int, *, instances: bool) -> list[Line]:
    room = max(_LEAST_NAME, width - sum(_WIDTHS) - len(_WIDTHS))
    lines = [Line(_row("MODEL", _TITLES, room), "dim")]
    for model in models:
        is_troubled = model["state"] == "READY" and bool(model["reason"])
        style = "red" if is_troubled else _STYLES.get(model["state"], "yellow")
        lines.append(Line(_row(_name(model), _cells(model), room), style))
        if model["reason"] and model["reason"] != "unloaded":
            lines.append(Line(f"  {_first_line(model['reason'])}", style))
        if instances:
            lines += [line for each in model["instances"] for line in _instance(each)]
    if not models:
        lines.append(Line("no model is loaded, and the repository has none"))
    return lines


def _name(model: Shown) -> str:
    return f"{model['name']}:{model['version']}" if model["version"] else str(model["name"])


def _cells(model: Shown) -> tuple[str, ...]:
    instances, recent = model["instances"], model.get("recent")
    ready = sum(each["state"] == "READY" for each in instances)
    memory = sum(each["rss_bytes"] or 0 for each in instances)
    if recent is None:
        return (model["state"], *[""] * (len(_TITLES) - 1))
    return (
        model["state"],
        f"{ready}/{len(instances)}",
        figure(recent["requests_per_s"]),
        _duration(recent["latency_us"]),
        str(model["queued"]),
        str(model["failure"]),
        str(sum(each["restarts"] for each in instances)),
        _size(memory) if memory else "",
    )


def _row(name: str, cells: Sequence[str], room: int) -> str:
    columns = [
        f"{cell:{side}{width}}" for cell, side, width in zip(cells, _ALIGN, _WIDTHS, strict=True)
    ]
    return f"{cut(name, room):<{room}} {' '.join(columns)}".rstrip()


def _instance(instance: Shown) -> list[Line]:
    facts = [instance["name"], instance["state"]]
    if instance["kind"] == "GPU":
        facts.append(f"GPU {instance['device_id']}")
    if instance["pid"] is not None:
        facts.append(f"pid {instance['pid']}")
    if instance["rss_bytes"] is not None:
        facts.append(_size(instance["rss_bytes"]))
    if instance["restarts"]:
        facts.append(_plural(instance["restarts"], "restart"))
    if instance["state"] != "READY":
        facts.append(_first_line(instance["because"]))
    lines = [Line("  " + "  ".join(facts), _STYLES.get(instance["state"], "yellow") or "dim")]
    if instance["pid"] is not None and instance["sandbox"] is not None:
        lines += _sandbox(instance["sandbox"])
    return lines


def _sandbox(sandbox: Shown) -> list[Line]:
    """Nothing where it is the usual one: what holds for most need not be read for each."""
    if sandbox["level"] == _USUAL_LEVEL:
        return []
    facts = [f"sandbox {sandbox['level']}: {', '.join(sandbox['layers'])}"]
    if sandbox["user"] is not None:
        facts.append(f"user {sandbox['user']}")
    if sandbox["granted"]:
        facts.append(f"granted: {', '.join(sandbox['granted'])}")
    missing = [Line(f"    left out: {sentence}", "yellow") for sentence in sandbox["left_out"]]
    return [Line("    " + "; ".join(facts), "dim"), *missing]


def _errors(errors: Sequence[Shown]) -> list[Line]:
    if not errors:
        return [Line("no errors since the server started", "dim")]
    lines = [Line("LATEST ERRORS", "dim")]
    for error in errors[:_MOST_ERRORS]:
        at = time.strftime("%H:%M:%S", time.localtime(error["last_ms"] / 1000))
        times = f" ({_plural(error['requests'], 'request')})" if error["requests"] else ""
        lines.append(Line(f"{at} {error['model']}{times}: {_first_line(error['text'])}", "red"))
    return lines


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _plural(count: int, word: str, many: str = "") -> str:
    return f"{count} {word if count == 1 else many or word + 's'}"


def _duration(us: float | None) -> str:
    if us is None:
        return "-"
    if us < 1000:
        return f"{figure(us)} µs"
    return f"{figure(us / 1e3)} ms" if us < 1e6 else f"{figure(us / 1e6)} s"


def _size(count_bytes: int) -> str:
    mib = count_bytes / 2**20
    return f"{figure(mib)} MiB" if mib < 1000 else f"{figure(mib / 1024)} GiB"


def _span(seconds: float) -> str:
    for name, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{int(seconds // unit_s)} {name}"
    return f"{int(seconds)} s"
