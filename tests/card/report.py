"""Summary of a visit: `summary.md` has what failed, the figures beside their goals, and what is left on the card."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.card import results, stages
from tests.card.facts import used_memory_mib

NAME = "summary.md"
_MOST_LINES = 60
_MOST_TEXT = 160
Line = Mapping[str, Any]


def last_of_each_stage(found: Sequence[Line]) -> list[Line]:
    """Return each stage's results of the last run that had it. A folder keeps those of all runs."""
    runs: list[list[Line]] = [[]]
    for line in found:
        if line["stage"] == results.START and line["name"] == "stages":
            runs.append([])
        runs[-1].append(line)
    last = {line["stage"]: number for number, run in enumerate(runs) for line in run}
    return [line for number, run in enumerate(runs) for line in run if last[line["stage"]] == number]


def _is_step(line: Line) -> bool:
    return bool(line["name"].startswith("step "))


def _cell(text: object) -> str:
    """Return text for a cell of a table, on one line."""
    words = re.sub(r"\s+", " ", str(text)).replace("|", "\\|").strip()
    return words if len(words) <= _MOST_TEXT else f"{words[: _MOST_TEXT - 2]} …"


def _value(line: Line) -> str:
    value = line["value"]
    words = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{words} {line['unit']}".strip()


def _stage(name: str, found: Sequence[Line]) -> str:
    """Return the row of a stage: what passed, failed and was left out, and the first failure."""
    steps = [line for line in found if _is_step(line)]
    own = [line for line in found if not _is_step(line)]
    counts = [sum(line["ok"] is ok for line in own) for ok in (True, False, None)]
    failed = [line for line in found if line["ok"] is False]
    # A step that was killed says more than the result that it had not come to.
    failed.sort(key=lambda line: not _is_step(line))
    first = f"{failed[0]['name']}: {failed[0]['text'] or _value(failed[0])}" if failed else ""
    # Steps of a round run side by side.
    ran = [(line["at_s"], line["value"]) for line in steps if line["value"] is not None]
    took_s = max(at_s for at_s, _ in ran) - min(at_s - value for at_s, value in ran) if ran else 0
    return f"| {name} | {' | '.join(map(str, counts))} | {took_s:.0f} | {_cell(first)} |"


def _facts(found: Sequence[Line]) -> list[str]:
    wanted = ("kernel", "python", "CUDA of the driver", "GPU 0", "package torch", "libcuda.so.1")
    by_name = {line["name"]: line for line in found if line["stage"] == "facts"}
    lines = [f"{name} {_value(by_name[name])}" for name in wanted if name in by_name and by_name[name]["ok"]]
    cards = by_name.get("nvidia-smi before", {"text": ""})["text"].splitlines()[:1]
    forms = [
        f"{name.rpartition(' ')[2]}: {line['value'] or 'pure Python'}"
        for name, line in by_name.items()
        if name.startswith("compiled forms in use")
    ]
    return [f"{'; '.join([*cards, *lines])}.", "", f"Compiled forms in use: {'; '.join(forms) or 'not known'}."]


def used_before(found: Sequence[Line]) -> float | None:
    """Return the MiB that were in use on the card when the facts were gathered, if they were."""
    values = [line["value"] for line in found if line["name"] == "nvidia-smi before"]
    return values[-1] if values else None


def _in_words(used_mib: float | None) -> str:
    return "not known" if used_mib is None else f"{used_mib:.0f} MiB"


def summary(found: Sequence[Line], after: tuple[float | None, str]) -> list[str]:
    """Return the lines of the page. `after` is what is in use on the card now."""
    lines = ["## On a card", "", *_facts(found), "", "| stage | passed | failed | left out | s | first failure |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for stage in stages.STAGES[:-1]:
        of_stage = [line for line in found if line["stage"] == stage.name]
        lines.append(_stage(stage.name, of_stage) if of_stage else f"| {stage.name} | | | | | did not run |")
    used, now = _in_words(used_before(found)), _in_words(after[0])
    words = _cell(after[1].splitlines()[-1] if after[1] else "")
    left = ["", f"In use on the card before: {used}; after: {now} ({words})."]
    figures = [line for line in found if line["stage"] in ("figures", "breadth", "soak")
               and line["value"] is not None and not _is_step(line)]  # fmt: skip
    # Those with a goal are what a reader looks for.
    figures.sort(key=lambda line: not line["expected"])
    table = ["", "| figure | value | goal | |", "| --- | --- | --- | --- |"]
    room = _MOST_LINES - len(lines) - len(left) - len(table) - 1
    for line in figures[:room]:
        mark = {True: "", False: "**missed**", None: "not tried"}[line["ok"]]
        table.append(f"| {_cell(line['name'])} | {_cell(_value(line))} | {_cell(line['expected'])} | {mark} |")
    if len(figures) > room:
        table.append(f"| {len(figures) - room} more | in {results.NAME} | | |")
    return [*lines, *(table if figures else []), *left]


def main() -> None:
    folder = Path(os.environ[results.RESULTS])
    found = last_of_each_stage(results.read(folder))
    # nvidia-smi may never answer.
    _write(folder, summary(found, (None, "nvidia-smi has not answered")))
    after, before = used_memory_mib(results.limit_s() / 4), used_before(found)
    if after[0] is None or before is None:
        results.record("nvidia-smi after", None, after[0], "MiB", text=after[1])
    else:
        # The driver may keep some pages of its own.
        is_clean = after[0] <= before + 16
        results.record("nvidia-smi after", is_clean, after[0], "MiB", f"at most {before + 16:.0f}", after[1])
    page = summary(found, after)
    _write(folder, page)
    print("\n".join(page))


def _write(folder: Path, page: Sequence[str]) -> None:
    made = folder / f".{NAME}"
    made.write_text("\n".join([*page, ""]))
    os.replace(made, folder / NAME)


if __name__ == "__main__":
    main()
