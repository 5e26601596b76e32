"""Compares a server's answers with a tritonserver's, and tells what it found, by extension."""

from __future__ import annotations

import http.client
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moonpool.runtime.conformance.asking import AskedServer, NeverHappened
from moonpool.runtime.conformance.cases import Case

Verdict = Literal["same", "differs", "fails"]
_LONGEST = 400


@dataclass(frozen=True)
class Outcome:
    """Is what came of one case.

    `same`: all answers are a tritonserver's. `differs`: as many requests succeeded and failed, but a text, a header, a
    value or a code is another one. `fails`: a request succeeded that should not, or the other way round, or there was
    no answer.
    """

    case: Case
    verdict: Verdict
    expected: Any
    found: Any

    def lines(self) -> list[str]:
        """Return the case and both answers, for people."""
        return [
            f"{self.verdict}: {self.case.protocol} {self.case.extension}: {self.case.name}",
            f"    expected {_short(self.expected)}",
            f"    found    {_short(self.found)}",
        ]


def outcomes(
    server: AskedServer, cases: Iterable[Case], expected: Mapping[str, Any], clear: Callable[[], None]
) -> Iterator[Outcome]:
    """Ask a server, case by case. `clear` makes the shared memory empty."""
    for case in cases:
        clear()
        wanted = expected[case.name]
        try:
            found = case.ask(server)
        except (NeverHappened, OSError, http.client.HTTPException) as error:
            yield Outcome(case, "fails", wanted, f"{type(error).__name__}: {error}")
            continue
        verdict: Verdict = "same" if found == wanted else "differs" if _course(found) == _course(wanted) else "fails"
        yield Outcome(case, verdict, wanted, found)


def _course(answers: Any) -> list[Any]:
    """Return which requests succeeded."""
    if isinstance(answers, tuple) and len(answers) == 3:  # a stream
        return [[bool(each.get("error_message")) for each in answers[0]], answers[1] == "OK"]
    if isinstance(answers, tuple):  # a method that is not there
        return [answers[0]]
    return [_succeeded(each) for each in answers]


def _succeeded(answer: Any) -> bool:
    if isinstance(answer, tuple) and isinstance(answer[0], int):  # HTTP: the status comes first
        return answer[0] < 400
    return not isinstance(answer, tuple)  # gRPC: a code and a text, or a message


def table(found: Iterable[Outcome]) -> list[str]:
    """Return a line for each extension and protocol, and one for all."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    total: Counter[str] = Counter()
    for each in found:
        counts.setdefault((each.case.extension, each.case.protocol), Counter())[each.verdict] += 1
        total[each.verdict] += 1
    lines = [_line("extension", "protocol", "requests", "same", "differs", "fails")]
    for (extension, protocol), of in sorted(counts.items(), key=lambda each: (each[0][0] != "core", each[0])):
        lines.append(_line(extension, protocol, of.total(), of["same"], of["differs"], of["fails"]))
    return [*lines, _line("all", "", total.total(), total["same"], total["differs"], total["fails"])]


def _line(extension: str, protocol: str, *counts: object) -> str:
    return f"{extension:<20} {protocol:<9}" + "".join(f"{each:>10}" for each in counts)


def as_json(found: Iterable[Outcome]) -> list[dict[str, str]]:
    """Return all outcomes for programs. Answers are literals of Python."""
    return [
        {
            "name": each.case.name,
            "protocol": each.case.protocol,
            "extension": each.case.extension,
            "verdict": each.verdict,
            "expected": repr(each.expected),
            "found": repr(each.found),
        }
        for each in found
    ]


def _short(answers: Any) -> str:
    text = repr(answers)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text)} characters)"
