"""The ways to call add_sub in another process, side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from moonpool.benchmarks.suites.peer.iceoryx import Iceoryx
from moonpool.benchmarks.suites.peer.peer import Peer, Unavailable
from moonpool.benchmarks.suites.peer.triton_in_process import TritonInProcess
from moonpool.benchmarks.suites.peer.ways import (
    Here,
    Moonpool,
    MoonpoolInPlace,
    Pipe,
    Pool,
    Queues,
    TorchQueues,
    TritonHttp,
)
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns

PEERS: Mapping[str, type[Peer]] = {
    "in this process": Here,
    "moonpool": Moonpool,
    "moonpool, inputs from empty()": MoonpoolInPlace,
    "Triton's Python backend, in process, C caller": TritonInProcess,
    "Triton's Python backend, over HTTP": TritonHttp,
    "ProcessPoolExecutor": Pool,
    "multiprocessing.Pipe": Pipe,
    "multiprocessing.Queue": Queues,
    "torch.multiprocessing.Queue": TorchQueues,
    "iceoryx2 request-response": Iceoryx,
}
# Floats in each of the four tensors, rounds, calls a round.
SIZES = {"4 floats": (4, 12, 200), "1 MB": (1 << 18, 6, 8), "16 MB": (1 << 22, 4, 2)}
CALLERS = 16


def measure(report: Report, quick: bool) -> None:
    """All ways that can be opened here, in turns, a size at a time; then with many callers."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, Peer] = {}
        for name, peer in PEERS.items():
            try:
                opened[name] = stack.enter_context(peer())
            except Unavailable as error:
                report.skipped(name, str(error))
        for size, (elements, rounds, calls) in SIZES.items():
            if quick and elements > 1 << 18:
                continue
            rounds, calls = (1, 2) if quick else (rounds, calls)
            cases = {name: _calls(peer, elements, calls) for name, peer in opened.items()}
            series = in_turns(cases, rounds)
            for name, found in series.items():
                report.figure(name, "µs", found.values, column=size, headline=True)
                if name != "moonpool":
                    ratio = found.over(series["moonpool"])
                    report.ratio(f"{name}, over moonpool", ratio, column=size)
        _many_callers(report, opened, *((1, 32) if quick else (4, 1600)))
    report.note("Two tensors of each size go there and two come back.")
    report.note("The same `model.py` runs in moonpool and in Triton.")


def _many_callers(report: Report, opened: Mapping[str, Peer], rounds: int, total: int) -> None:
    rates: dict[str, Callable[[], Sequence[float]]] = {}
    for name, peer in opened.items():
        if peer.rate(CALLERS, CALLERS) is not None:
            rates[name] = _rate(peer, total)
    for name, found in in_turns(rates, rounds).items():
        where = f"4 floats, {CALLERS} callers"
        report.figure(name, "requests/s", found.values, column=where, headline=True)


def _calls(peer: Peer, elements: int, calls: int) -> Callable[[], Sequence[float]]:
    return lambda: peer.times_us(elements, calls)


def _rate(peer: Peer, total: int) -> Callable[[], Sequence[float]]:
    return lambda: [peer.rate(CALLERS, total) or 0.0]


if __name__ == "__main__":
    main("peers", "What else could a user call add_sub in another process with?", measure)
