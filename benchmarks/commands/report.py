"""Tables, warnings and pictures of `moonpool bench`, made from the figures that it writes into a file."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moonpool.benchmarks.loads import load_in_short
from moonpool.benchmarks.result import described, names, others_of, verdict
from moonpool.benchmarks.slo import time_words
from moonpool.benchmarks.windows import FALLS_BEHIND, PARTS, SATURATED
from moonpool.runtime.cli.shared import figure, load_in_words, table
from moonpool.runtime.process.terminal import Terminal, harmless

_PERCENTILES = ("p50", "p90", "p95", "p99", "max")
_PARTS = {
    "queue": "queue µs",
    "compute_input": "input µs",
    "compute_infer": "compute µs",
    "compute_output": "output µs",
}


def show_requests(terminal: Terminal, about: Mapping[str, Any], size_bytes: int, *, is_made_up: bool) -> None:
    """Write the first lines, which describe the requests and the machine."""
    how = [
        "made up" if is_made_up else "as given",
        *(["in shared memory"] if about["shared_memory"] != "none" else []),
        *(["as JSON"] if about["json_tensors"] else []),
        *(["in streams"] if about["streaming"] else []),
        *([f"the first of {about['different_requests']}"] if about["different_requests"] > 1 else []),
        *([f"in sequences of {_between(about['sequences'])}"] if about["sequences"] else []),
    ]
    sent = f"{described(about['inputs'])}, {size_bytes:,} bytes, {', '.join(how)}"
    terminal.line(harmless(f"{about['model']}, {about['where']}, each request: {sent}"))
    terminal.line(load_in_words(about["load_average"]))


def _between(lengths: Sequence[int]) -> str:
    least, most = lengths
    return str(least) if least == most else f"{least} to {most}"


def show(terminal: Terminal, found: Mapping[str, Any], *, in_turns: bool) -> None:
    """Write the tables: of the callers, of the server's own account, and of the comparison."""
    if "isolation" in found or "hosts" in found:
        _several(terminal, found)
        return
    if "against" not in found:
        _tables(terminal, found)
        return
    ours, theirs = map(harmless, names(found, found["against"]))
    for name, each in ((ours, found), (theirs, found["against"])):
        terminal.line(terminal.paint(f"{name}:", "bold"))
        _tables(terminal, each)
        terminal.line()
    how = "in turns" if in_turns else "at two times"
    terminal.line(terminal.paint(f"{ours} over {theirs}:", "bold"))
    _rows(terminal, ratios_of(found))
    terminal.line(f"medians of ratios, least to most; {how}; alike where they lie on both sides of 1")


def _several(terminal: Terminal, found: Mapping[str, Any]) -> None:
    """Write the tables of each level of the sandbox or each host, and the ratios over the first one."""
    others = others_of(found)
    for each in (found, *others):
        terminal.line(terminal.paint(f"{harmless(each['where'])}:", "bold"))
        if host := each.get("host"):
            terminal.line(harmless(f"{host['versions']}; {host['command']}"))
        _tables(terminal, each)
        terminal.line()
    for each in others:
        # The first one that is called in process is over nothing.
        if each["over"] != each["where"]:
            words = f"{harmless(each['where'])} over {harmless(each['over'])}:"
            terminal.line(terminal.paint(words, "bold"))
            _rows(terminal, ratios_of(each))
    if others:
        terminal.line("medians of ratios, least to most; in turns; alike where they lie on both sides of 1")


def _advice(terminal: Terminal, found: Mapping[str, Any]) -> None:
    """Write the advice for the heaviest load that has any."""
    advised = [point for point in found["series"] if point.get("advice")]
    if advised:
        advice = advised[-1]["advice"]
        terminal.line()
        terminal.line(harmless(f"with {_load_in_words(advised[-1])} {advice['text']};"))
        terminal.line(harmless(f"in config.pbtxt: {advice['line']}"))


def _tables(terminal: Terminal, found: Mapping[str, Any]) -> None:
    for number, (rows, words) in enumerate(tables_of(found)):
        if number:
            terminal.line()
        _rows(terminal, rows)
        if words:
            terminal.line(words)
    if not found["series"]:
        return
    _faults(terminal, found)
    _slo(terminal, found)
    _advice(terminal, found)


def tables_of(found: Mapping[str, Any]) -> Iterator[tuple[list[list[str]], str]]:
    """Yield the tables of a result, each with the words below it: of the callers first, then those of the server."""
    points = found["series"]
    if not points:
        return
    yield _callers(found), ""
    if any(point.get("first_response_us") for point in points):
        yield _responses(found), ""
    if any(point["server"] for point in points):
        yield _server(found), ""
    if any(point.get("resources") for point in points):
        yield _resources(found), ""
    if any(point.get("confidence") for point in points):
        runs = max(len(point.get("runs") or ()) for point in points)
        yield _confidence(found), f"95 % intervals of the means of {runs} runs"


def _rows(terminal: Terminal, rows: Sequence[Sequence[str]]) -> None:
    head, *lines = table(rows, align=">" * len(rows[0]))
    terminal.line(terminal.paint(head, "bold"))
    for line in lines:
        terminal.line(line)


_HEADS = {
    "concurrency": "callers", "request_rate": "asked", "load_shape": "load", "schedule": "schedule",
}  # fmt: skip


def _load_head(found: Mapping[str, Any]) -> str:
    return next(head for field, head in _HEADS.items() if field in found["series"][0])


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _callers(found: Mapping[str, Any]) -> list[list[str]]:
    head = [_load_head(found), "requests/s", *(f"{name} µs" for name in _PERCENTILES), "failed"]
    has_generator = any(point["generator_share"] is not None for point in found["series"])
    of_slo = ["good/s", "holds"] if "slo" in found else []
    has_cancelled = any("cancelled" in point for point in found["series"])
    rows = [[*head, *(["cancelled"] if has_cancelled else []), *of_slo, *(["generator"] if has_generator else [])]]
    for point in found["series"]:
        latency = point["latency_us"]
        rows.append(
            [
                load_in_short(point),
                f"{point['requests_per_s']:,.0f}",
                *(_us(latency[name]) for name in _PERCENTILES),
                str(point["failed"]),
                *([str(point.get("cancelled", 0))] if has_cancelled else []),
                *([f"{point['goodput_per_s']:,.0f}", _holds(point)] if of_slo else []),
                *([f"{point['generator_share']:.0%}"] if has_generator else []),
            ]
        )
    return rows


def _resources(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of what the model and its server used."""
    points = [point for point in found["series"] if point.get("resources")]
    has_gpu = any(point["resources"]["gpu_memory_bytes"] is not None for point in points)
    rows = [[_load_head(found), "cpu µs/request", "cores", "memory MB"] + (["GPU", "GPU memory MB"] if has_gpu else [])]
    for point in points:
        used = point["resources"]
        per_request, utilization = used["cpu_s_per_request"], used["gpu_utilization"]
        rows.append(
            [
                load_in_short(point),
                "-" if per_request is None else figure(per_request * 1e6),
                figure(used["cores"]),
                f"{used['memory_bytes'] / 1e6:,.0f}",
            ]
        )
        if has_gpu:
            share = "-" if utilization is None else f"{utilization:.0%}"
            rows[-1] += [share, f"{(used['gpu_memory_bytes'] or 0) / 1e6:,.0f}"]
    return rows


def _faults(terminal: Terminal, found: Mapping[str, Any]) -> None:
    """Write how many instances were harmed, and what became of the requests."""
    faults = found.get("faults")
    if not faults:
        return
    failed = sum(window["failed"] for point in found["series"] for window in point["windows"])
    answered = sum(window["requests"] for point in found["series"] for window in point["windows"])
    count = "once" if faults["count"] == 1 else f"{faults['count']} times"
    words = f"{count} an instance was {faults['kind']}"
    if faults["for_s"] is not None:
        words += f" for {faults['for_s']:g} s or until its host had replaced it"
    if faults["recovered_s"]:
        back = faults["recovered_s"]
        words += f"; as many as before were ready after {back['median']:.2f} s, at most {back['max']:.2f} s"
    if faults["not_recovered"]:
        words += f"; {faults['not_recovered']} did not come back"
    share = failed / (failed + answered) if failed + answered else 0.0
    terminal.line()
    terminal.line(f"{words}; {share:.2%} of all requests failed, and the latencies are those of the others")


def _confidence(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of the intervals of figures over several runs."""
    points = [point for point in found["series"] if point.get("confidence")]
    heads = {"requests_per_s": "requests/s", "p50": "p50 µs", "p99": "p99 µs"}
    rows = [[_load_head(found), *heads.values()]]
    for point in points:
        known = point["confidence"]
        cells = [
            f"{figure(known[name]['low'])} to {figure(known[name]['high'])}" if name in known else "-" for name in heads
        ]
        rows.append([load_in_short(point), *cells])
    return rows


def _holds(point: Mapping[str, Any]) -> str:
    return "yes" if point["broken"] is None else f"no: {point['broken']}"


def _slo(terminal: Terminal, found: Mapping[str, Any]) -> None:
    """Write the highest rate that holds."""
    if "slo" not in found or not any("request_rate" in point for point in found["series"]):
        return
    slo = found["slo"]
    limits = ", ".join(f"{name} {time_words(us)}" for name, us in slo["limits_us"].items())
    highest, lowest = slo["highest_rate"], slo["lowest_broken_rate"]
    words = f"no rate holds {limits}"
    if highest is not None:
        words = f"{highest:g} requests/s hold {limits}"
        words += f", and {lowest:g} do not" if lowest is not None else "; no higher one was tried"
    terminal.line()
    terminal.line(terminal.paint(words, "bold"))


def _responses(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        [
            _load_head(found), "responses/s", "first p50 µs", "first p99 µs", "between p50 µs",
            "between p99 µs",
        ]
    ]  # fmt: skip
    for point in found["series"]:
        first = point.get("first_response_us") or {}
        between = point.get("between_responses_us") or {}
        rows.append(
            [
                load_in_short(point),
                f"{point.get('responses_per_s', 0):,.0f}",
                *(_us(times.get(name)) for times in (first, between) for name in ("p50", "p99")),
            ]
        )
    return rows


def _server(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [[_load_head(found), *(_PARTS[part] for part in PARTS), "rows/batch"]]
    for point in found["series"]:
        server = point["server"]
        if server:
            parts = [figure(server[f"{part}_us"]) for part in PARTS]
            rows.append([load_in_short(point), *parts, figure(server["rows_per_execution"])])
    return rows


def ratios_of(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of the ratios of a result over another one."""
    heads = {"requests_per_s": "requests/s", "p50": "p50", "p99": "p99"}
    rows = [[_load_head(found), *heads.values()]]
    for point in found["series"]:
        ratios = point.get("ratios")
        if not ratios:
            rows.append([load_in_short(point), *(["not measured there"] + [""] * (len(heads) - 1))])
            continue
        rows.append([load_in_short(point), *(_ratio(name, ratios.get(name)) for name in heads)])
    return rows


def _ratio(name: str, ratio: Mapping[str, float] | None) -> str:
    if ratio is None:
        return "-"
    spread = f"{figure(ratio['least'])} to {figure(ratio['most'])}"
    return f"{figure(ratio['median'])} ({spread}) {verdict(name, ratio)}"


def warnings(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about figures that should not be trusted."""
    measured = [found, *([found["against"]] if "against" in found else []), *others_of(found)]
    yield from unsettled(measured)
    for each in measured:
        for point in each["series"]:
            yield from _warnings_of(point, f"{each['where']}, {_load_in_words(point)}", each)


def _load_in_words(point: Mapping[str, Any]) -> str:
    callers = point.get("concurrency")
    return load_in_short(point) if callers is None else f"{callers} caller{'s' if callers > 1 else ''}"


def unsettled(measured: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one line for all loads that did not settle."""
    places = []
    for each in measured:
        loads = [load_in_short(point) for point in each["series"] if not point["stable"]]
        if loads:
            kind = ""
            if "concurrency" in each["series"][0]:
                kind = " caller" if loads == ["1"] else " callers"
            places.append(f"{each['where']} with {', '.join(loads)}{kind}")
    if places:
        yield (
            f"the windows still differed at the end: {'; '.join(places)}; give them more time (--seconds) or a quieter "
            "machine"
        )


def _warnings_of(point: Mapping[str, Any], where: str, found: Mapping[str, Any]) -> Iterator[str]:
    share = point["generator_share"]
    if share is not None and share >= SATURATED:
        cores = len(os.sched_getaffinity(0))
        advice = f"use --processes {found['processes'] + 1}"
        if found["processes"] >= cores:
            advice = "press from another machine"
        yield f"{where}: the load generator was busy {share:.0%} of the time, so it may be what was measured; {advice}"
    planned = point["requests"] + point["failed"] + point.get("unsent", 0)
    late = point.get("delayed", 0)
    if late > FALLS_BEHIND * planned:
        unsent = point["unsent"]
        # A few that were late on a busy machine are no sign that it could not send as many.
        never = f", and {unsent} were never sent: it could not keep up" if unsent else ""
        yield f"{where}: {late} of {planned} requests were sent more than 1 ms late{never}"


_AXES = {"concurrency": "concurrent callers", "request_rate": "requests/s asked for"}
_COLOURS = {"p50": "C0", "p90": "C1", "p99": "C2"}


def can_plot(found: Mapping[str, Any]) -> bool:
    """Return True if matplotlib is installed and the loads are points on an axis."""
    return bool(found["series"]) and any(kind in found["series"][0] for kind in _AXES)


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def title(found: Mapping[str, Any]) -> str:
    """Return a picture's title: the model and its requests, and below them what differs between the two lines."""
    first = f"{found['model']}, {described(found['inputs'])}"
    if "against" not in found:
        return f"{first}\n{found.get('label') or found['where']}"
    ours, theirs = names(found, found["against"])
    return f"{first}\n{ours} (solid) and {theirs} (dashed)"


def save_plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw throughput and latency by load, side by side, with dashed lines for the other result. Needs matplotlib."""
    # Importing it takes half a second, and most commands do not need it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    figure.suptitle(title(found))
    kind = next(kind for kind in _AXES if kind in found["series"][0])
    _draw(throughput, latency, found, kind, "-")
    if "against" in found:
        _draw(throughput, latency, found["against"], kind, "--")
    throughput.set_ylabel("requests/s")
    latency.set_ylabel("latency, µs")
    latency.legend()
    loads = [point[kind] for point in found["series"]]
    for axes in (throughput, latency):
        axes.set_xlabel(_AXES[kind])
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _draw(throughput: Any, latency: Any, found: Mapping[str, Any], kind: str, style: str) -> None:
    points = [point for point in found["series"] if kind in point]
    loads = [point[kind] for point in points]
    rates = [point["requests_per_s"] for point in points]
    throughput.plot(loads, rates, marker="o", linestyle=style, color="C0")
    for name, colour in _COLOURS.items():
        values = [point["latency_us"][name] for point in points]
        # One name in the legend for both lines of a colour.
        label = name if style == "-" else None
        latency.plot(loads, values, marker="o", linestyle=style, color=colour, label=label)
