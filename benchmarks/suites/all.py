"""Run all benchmarks one after the other, each in a process of its own, and print tables of their results."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moonpool.benchmarks.suites.report import machine_in_words, read, table

NAMES = (
    "latency",
    "throughput",
    "mixed",
    "tensor_size",
    "startup",
    "source",
    "contained",
    "memory",
    "prefork",
    "residency",
    "streaming",
    "bls",
    "ensembles",
    "bytes_tensors",
    "peers",
    "serve",
    "openai",
    "truth",
    "ray_serve",
    "triton",
    "gpu",
)
RESULTS = Path(__file__).resolve().parents[1] / "results"
_TABLE = "RESULTS.md"


def figures(folder: Path = RESULTS, *, headlines_only: bool = True) -> str:
    """The tables of the runs in `folder` as Markdown; with `headlines_only`, their main figures."""
    runs = [read(folder / f"{name}.jsonl") for name in NAMES if (folder / f"{name}.jsonl").exists()]
    if not runs:
        return f"There are no results in {folder}; make some with `python -m moonpool.benchmarks.suites.all`."
    machines = dict.fromkeys(machine_in_words(run[0]) for run in runs)
    tables = [table(run, headlines_only=headlines_only) for run in runs]
    words = "Medians, with the 10th and the 90th percentile in brackets"
    return "\n\n".join([f"{words}. {'; '.join(machines)}.", *tables]) + "\n"


def run_all(names: list[str], folder: Path, *, quick: bool) -> list[str]:
    """Run these benchmarks, with their lines to `folder`; returns the names of those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        before = time.monotonic()
        command = [sys.executable, "-m", f"moonpool.benchmarks.suites.{name}"]
        options = ["--json", str(folder / f"{name}.jsonl"), *(["--quick"] if quick else [])]
        ended = subprocess.run([*command, *options], stdout=subprocess.DEVNULL, check=False)
        words = "done" if ended.returncode == 0 else f"failed with {ended.returncode}"
        print(f"{name}: {words} in {time.monotonic() - before:.0f} s", file=sys.stderr)
        if ended.returncode:
            failed.append(name)
    return failed


def main() -> int:
    """Run the command line. Returns 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(prog="python -m moonpool.benchmarks.suites.all", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"benchmarks to run, of {', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="only check that they work")
    parser.add_argument(
        "--table", action="store_true", help="run nothing, print the main figures of the results so far"
    )
    parser.add_argument("--results", type=Path, help=f"folder of the results; {RESULTS} by default, --quick keeps none")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"there is no benchmark {min(unknown)!r}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.results or (Path(scratch) if arguments.quick else RESULTS)
        failed: list[str] = []
        if not arguments.table:
            failed = run_all(arguments.names or list(NAMES), folder, quick=arguments.quick)
            (folder / _TABLE).write_text(figures(folder, headlines_only=False))
        print(figures(folder))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
