"""Tensors of strings: encoding, decoding, and the trip through a model that does both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import calls_in_turns
from moonpool.ipc.tensors import decode_bytes, encode_bytes

COUNTS = (1, 100, 10_000, 100_000)


def texts(count: int) -> NDArray[np.object_]:
    """Short strings of different lengths."""
    array = np.empty(count, np.object_)
    array[:] = [b"text %d" % index for index in range(count)]
    return array


def measure(report: Report, quick: bool) -> None:
    """moonpool's codec and tritonclient's in turns, then whole calls."""
    rounds, calls = (1, 1) if quick else (8, 3)
    codecs = _codecs(report, texts(1000 if quick else 100_000))
    series = calls_in_turns(codecs, rounds, calls)
    for name, found in series.items():
        ours = "moonpool" in name
        values = [value / 1000 for value in found.values]
        report.figure(name, "ms", values, goal="≤ 20 ms" if ours else "", headline=ours)
    with moonpool.Runtime() as runtime:
        runtime.load("texts", MODELS / "texts")
        trips = {f"trip of {count:,} strings": _trip(runtime, count) for count in COUNTS}
        for name, found in calls_in_turns(trips, rounds, calls).items():
            report.figure(name, "µs", found.values)
    report.note(
        "A trip encodes and decodes on both sides: four times in all, and the model's part includes "
        "the objects that Python makes."
    )


def _codecs(report: Report, array: NDArray[np.object_]) -> dict[str, Callable[[], object]]:
    data = encode_bytes(array)
    count = f"{array.size:,} strings"
    codecs: dict[str, Callable[[], object]] = {
        f"encode {count}, moonpool": lambda: encode_bytes(array),
        f"decode {count}, moonpool": lambda: decode_bytes(data, array.shape),
    }
    try:
        from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor
    except ImportError as error:
        report.skipped("tritonclient's codec", str(error))
        return codecs
    return codecs | {
        f"encode {count}, tritonclient": lambda: serialize_byte_tensor(array),
        f"decode {count}, tritonclient": lambda: deserialize_bytes_tensor(data),
    }


def _trip(runtime: moonpool.Runtime, count: int) -> Callable[[], object]:
    array = texts(count)

    def call() -> None:
        runtime.infer("texts", {"TEXT": array})

    return call


if __name__ == "__main__":
    main("bytes_tensors", "What do tensors of strings cost?", measure)
