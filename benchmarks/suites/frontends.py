"""Throughput of several front ends: the same server with one process at the ports, and with more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from moonpool.benchmarks.suites.peer.presser import (
    Case,
    Failed,
    Shown,
    press_in_turns,
    presser,
    report_rows,
)
from moonpool.benchmarks.suites.peer.served import MoonpoolServed
from moonpool.benchmarks.suites.report import Report, main

_MODEL = "add_sub"
_CALLERS = 16
_ROUNDS = 5


_SHOWN = {
    "requests_per_s": Shown("", "requests/s", None, True),
    "p99_us": Shown("p99, ", "µs", None),
    "processor_us": Shown("processor, ", "µs", None),
    # If there are cores enough, the busiest process is the limit: each process runs one of its threads at a time.
    "busiest_us": Shown("busiest process, ", "µs", None, True),
    "main_us": Shown("main process, ", "µs", None),
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
                sides = {f"{n} at the ports": (case, server) for n, server in servers.items()}
                found = press_in_turns(pressed, sides, _ROUNDS, quick=quick)
            except Failed as error:
                report.skipped(name, str(error))
                continue
            report_rows(report, name, found, _SHOWN)
            first, *others = found.values()
            for count, rows in zip(list(servers)[1:], others, strict=True):
                pairs = zip(rows, first, strict=True)
                ratios = [a.requests_per_s / b.requests_per_s for a, b in pairs]
                report.ratio(name, ratios, column=f"ratio of {count} to 1", headline=True)
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


if __name__ == "__main__":
    main("frontends", "What do several front ends give?", measure)
