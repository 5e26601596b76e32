"""Figures of the card:   python -m tests.card.figures PART [pure]

Measures one part of `moonpool.benchmarks.suites.gpu`, with `pure` without moonpool's compiled forms, and records each
figure beside its goal as soon as it is known. The lines also go to `gpu.jsonl` in the folder of the results, which is a
file for `benchmarks/results`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.card.results import RESULTS, record, recorded, share

NAME = "gpu.jsonl"
# The seconds in which a part measures. Imports, the first contexts, loads and the end of all processes take as long
# again.
MEASURED_S = {
    "sizes": 13.0,
    "forms": 4.0,
    "torch": 8.0,
    "callers": 7.0,
    "pipeline": 4.0,
    "strict": 4.0,
    "kill": 4.0,
    "sleep": 6.0,
}


class Recorder:
    """Records the lines of a benchmark's report."""

    def __init__(self, part: str, *, is_judged: bool) -> None:
        self._part, self._is_judged = part, is_judged
        self._file = Path(os.environ[RESULTS], NAME)

    def hear(self, line: Mapping[str, Any]) -> None:
        """Take one line, and write it down."""
        # All parts together are one run.
        if line["kind"] != "run" or not self._file.exists():
            with self._file.open("a") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if line["kind"] == "figure":
            self._figure(line)
        elif line["kind"] == "skipped":
            ok = False if line.get("failed") else None
            record(f"{self._part}: {line['name']}", ok, text=line["reason"])
        elif line["kind"] == "note":
            record(f"{self._part}: note", True, text=line["text"])

    def _figure(self, line: Mapping[str, Any]) -> None:
        name = f"{line['name']}, {line['column']}" if line["column"] else line["name"]
        words = f"{line['p10']:.4g} to {line['p90']:.4g}, {line['samples']} samples"
        is_met = meets(line["median"], line["goal"])
        if not self._is_judged:
            is_met, words = True, f"{words}; a fake driver has no speed, so no goal is missed"
        value = float(f"{line['median']:.4g}")
        record(name, is_met, value, line["unit"] or "times", line["goal"], words)


def meets(value: float, goal: str) -> bool:
    """Return True if a value meets a goal such as `at most 1.5`, or if there is none."""
    found = re.fullmatch(r"at (most|least) ([\d.]+)", goal)
    if found is None:
        return True
    limit = float(found[2])
    return value <= limit if found[1] == "most" else value >= limit


def measure(part: str) -> None:
    """Measure a part."""
    # Imported here, since what they import depends on MOONPOOL_PURE.
    from tests.card.nodes import nodes_known

    from moonpool.benchmarks.suites import gpu
    from moonpool.benchmarks.suites.report import Report
    from moonpool.ipc.cuda.device import device
    from moonpool.runtime.model.gpus import usable_gpus

    gpus, why = usable_gpus()
    if not gpus:
        record(f"{part}: a GPU", False, text=why)
        return
    where = device(0)
    recorder = Recorder(part, is_judged=not is_fake(where.name))
    form = "compiled" if gpu.IS_COMPILED else "Python alone"
    report = Report("gpu", gpu.QUESTION, False, recorder.hear)
    report.note(f"{where.name}; {gpu.driver_in_words()}; {form}.")
    with nodes_known() if part == "strict" else contextlib.nullcontext():
        gpu.measure_part(report, part, gpu.Pace(MEASURED_S[part] * share()))
    report.close()


def is_fake(name: str) -> bool:
    """Return True for a device of the fake driver."""
    return name.startswith("Fake GPU")


if __name__ == "__main__":
    if "pure" in sys.argv[2:]:
        os.environ["MOONPOOL_PURE"] = "1"
    with recorded(sys.argv[1]):
        measure(sys.argv[1])
