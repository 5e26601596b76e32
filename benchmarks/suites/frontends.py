"""Throughput of several front ends: the same server with one process at the ports, and with more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from moonpool.benchmarks.suites.peer.presser import Case, Failed, Presser, presser
from moonpool.benchmarks.suites.peer.served import MoonpoolServed
from moonpool.benchmarks.suites.report import Report, main

_MODEL = "add_sub"
_CALLERS = 16
_ROUNDS = 5
_SECONDS = 1.5


class Row(NamedTuple):
    """The figures of one window. Processor times: all processes of the server, the busiest, the main one.

    If there are cores enough, the busiest process is the limit: each process runs one of its threads at a time.
    """

    requests_per_s: float
    p99_us: float
    processor_us: float
    busiest_us: float
    main_us: float


# Each has its name in a table, its unit, and true if the short table has it.
_SHOWN = {
    "requests_per_s": ("", "requests/s", True),
    "p99_us": ("p99, ", "µs", False),
    "processor_us": ("processor, ", "µs", False),
    "busiest_us": ("busiest process, ", "µs", True),
    "main_us": ("main process, ", "µs", False),
}


def counts() -> list[int]:
    """Return the numbers of front ends to try: powers of two up to the number of cores, and at least one and two."""
    cores = len(os.sched_getaffinity(0))
    return [1, 2, *(1 << n for n in range(2, 8) if 1 << n <= cores)]


def cases() -> dict[str, Case]:
    pair = {"INPUT0": 4, "INPUT1": 4}
    return {
        f"add_sub, {protocol.upper()}, {_CALLERS} callers": Case(
            protocol, _MODEL, "FP32", pair, True, _CALLERS
        )
        for protocol in ("http", "grpc")
    }


def measure(report: Report, quick: bool) -> None:
    """Each case with all servers in turns; the first round does not count."""
    pressed = presser()
    with _servers() as servers:
        for name, case in cases().items():
            try:
                found = _in_turns(pressed, case, servers, quick)
            except Failed as error:
                report.skipped(name, str(error))
                continue
            _report(report, name, found)
    report.note(
        f"Server, one instance of the model and generator share {len(os.sched_getaffinity(0))} cores; "
        f"{pressed.words}."
    )
    report.note("Processor: time of the processes of a server for one answered request.")
    report.note("Ratios are to one process of the same round.")


@contextlib.contextmanager
def _servers() -> Iterator[dict[int, MoonpoolServed]]:
    with contextlib.ExitStack() as stack:
        servers = {}
        for count in counts():
            servers[count] = MoonpoolServed((_MODEL,), [f"--frontends={count}"])
            stack.callback(servers[count].close)
        yield servers


def _in_turns(
    pressed: Presser, case: Case, servers: Mapping[int, MoonpoolServed], quick: bool
) -> Mapping[int, Sequence[Row]]:
    """The rows of each server, a round at a time; the first one changes."""
    rounds, seconds = (1, 0.3) if quick else (_ROUNDS, _SECONDS)
    found: dict[int, list[Row]] = {count: [] for count in servers}
    for server in servers.values():
        case.check(server.port(case.protocol))
    for turn in range(0 if quick else -1, rounds):
        for count, server in sorted(servers.items(), reverse=turn % 2 == 0):
            answered, before = server.answered(case.model), server.busy_by_process_s()
            sample = pressed.press(case, server.port(case.protocol), seconds)
            after = server.busy_by_process_s()
            answered = max(1, server.answered(case.model) - answered)
            main_us, *others_us = (
                1e6 * (busy_s - before.get(pid, 0.0)) / answered for pid, busy_s in after.items()
            )
            busy_us, busiest_us = main_us + sum(others_us), max(main_us, *others_us)
            if turn >= 0:
                row = Row(sample.requests_per_s, sample.p99_us, busy_us, busiest_us, main_us)
                found[count].append(row)
    return found


def _report(report: Report, name: str, found: Mapping[int, Sequence[Row]]) -> None:
    for field, (words, unit, is_headline) in _SHOWN.items():
        for count, rows in found.items():
            values = [getattr(row, field) for row in rows]
            column = f"{words}{count} at the ports"
            report.figure(name, unit, values, column=column, headline=is_headline)
    for count, rows in found.items():
        if count > 1:
            pairs = zip(rows, found[1], strict=True)
            ratios = [a.requests_per_s / b.requests_per_s for a, b in pairs]
            report.ratio(name, ratios, column=f"ratio of {count} to 1", headline=True)


if __name__ == "__main__":
    main("frontends", "What do several front ends give?", measure)
