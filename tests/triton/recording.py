"""Answers of a tritonserver, recorded with their requests: the usual run replays them, and starts no tritonserver.

`pytest tests/triton --record=FOLDER` asks a tritonserver, and writes what it answers. `.ci/run triton-recordings` does
so, and shows where the answers are no longer those of `recordings/`.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pytest
from tests.triton.answers import Answer, Failure, LogLine, Output, output_of

FOLDER = Path(__file__).parent / "recordings"
# What is longer stands in a recording with its length and its digest.
LONGEST = 6000
LONGEST_REQUEST = 200
P = ParamSpec("P")
T = TypeVar("T")


class Large:
    """A text, or bytes, of which only the digest was kept."""

    def __init__(self, length: int, digest: str) -> None:
        self.kept = length, digest

    @classmethod
    def of(cls, value: bytes | str) -> Large:
        data = value if isinstance(value, bytes) else value.encode()
        return cls(len(value), hashlib.sha256(data).hexdigest()[:32])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, bytes | str):
            return self == Large.of(other)
        return isinstance(other, Large) and self.kept == other.kept

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Large({self.kept[0]}, {self.kept[1]!r})"


NAMES: dict[str, Any] = {
    **{each.__name__: each for each in (Answer, Failure, Large, LogLine, Output)},
    "inf": float("inf"),
    "nan": float("nan"),
    "__builtins__": {},
}


def shortened(value: Any) -> Any:
    """The value with arrays as outputs, and with a digest in the place of whatever is large."""
    match value:
        case bytes() | str():
            return Large.of(value) if len(value) > LONGEST else value
        case np.ndarray():
            return shortened(output_of(value))
        case dict():
            return {name: shortened(each) for name, each in value.items()}
        case list():
            return [shortened(each) for each in value]
        case tuple():
            items = [shortened(each) for each in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class Recording:
    """The answers by the test, or the fixture, and the request."""

    def __init__(self) -> None:
        # The folder that answers are written to, if a tritonserver is asked.
        self.folder: Path | None = None
        # Paths of this run, and what stands in a recording for each.
        self.paths: dict[str, str] = {}
        self._place = ("", "")
        self._asked: Counter[str] = Counter()
        self._written: dict[str, dict[str, list[tuple[str, str]]]] = defaultdict(dict)

    @property
    def is_live(self) -> bool:
        """True if a tritonserver is asked."""
        return self.folder is not None

    def name(self, repository: Path) -> None:
        """Let a recording name this repository after its folder, without the number that pytest gave it."""
        self.paths[str(repository)] = f"{{{repository.parent.name.rstrip('0123456789')}}}"

    def begin(self, module: str, test: str) -> None:
        """Look from now on for answers to the requests of this test, or of what several tests begin with."""
        module = module.removeprefix("tests.triton.")
        # pytest escapes the id of a case once for each file that has the test.
        test = re.sub(r"\\+", r"\\", test)
        if module != self._place[0]:
            self.write()
        self._place = module, test
        self._asked.clear()
        if self.is_live:
            self._written[self._place[0]][test] = []

    @contextmanager
    def at(self, module: str, fixture: str) -> Iterator[None]:
        """Look for the answers to the requests of a fixture that several tests have."""
        before = self._place, self._asked
        self._asked = Counter()
        self.begin(module, fixture)
        try:
            yield
        finally:
            self._place, self._asked = before

    def ask(self, request: str, live: Callable[[], Any]) -> Any:
        """Return the recorded answer. `live` asks a tritonserver."""
        request = _brief(self._named(request))
        module, test = self._place
        if self.is_live:
            answer = shortened(live())
            self._written[module].setdefault(test, []).append((request, self._named(repr(answer))))
            return answer
        answers = [answer for asked, answer in self._read(module).get(test, []) if asked == request]
        if not answers:
            pytest.fail(
                f"no tritonserver's answer to {request[:300]} is recorded for {test} of {module}: "
                "run `bash .ci/run triton-recordings`",
                pytrace=False,
            )
        # One who asks again until something has happened gets the last answer.
        number = min(self._asked[request], len(answers) - 1)
        self._asked[request] += 1
        text = answers[number]
        for path, name in self.paths.items():
            text = text.replace(name, path)
        return eval(text, NAMES)

    def _named(self, text: str) -> str:
        for path, name in self.paths.items():
            text = text.replace(path, name)
        return text

    def write(self) -> None:
        """Write what was recorded since the last time. Tests that did not run keep their answers."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for module, tests in self._written.items():
            if not any(tests.values()):
                continue
            tests = _parsed(self.folder / f"{module}.txt") | tests
            lines = [f"# tritonserver 2.51.0 under Python {VERSION}"]
            for test in sorted(name for name, said in tests.items() if said):
                lines.append(f"\n[{test}]")
                lines += [f"> {request}\n< {answer}" for request, answer in tests[test]]
            (self.folder / f"{module}.txt").write_text("\n".join(lines) + "\n")
        self._written.clear()

    @functools.cache  # noqa: B019 - there is one recording
    def _read(self, module: str) -> dict[str, list[tuple[str, str]]]:
        file = FOLDER / f"{module}.txt"
        if file.exists() and not file.read_text().partition("\n")[0].endswith(f"Python {VERSION}"):
            pytest.skip(f"{file.name} was recorded under another Python, whose errors may differ")
        return _parsed(file)


def _brief(request: str) -> str:
    """The beginning of a request, and the digest of all of it: the tests have the rest."""
    if len(request) <= LONGEST_REQUEST:
        return request
    return f"{request[:LONGEST_REQUEST]} … {hashlib.sha256(request.encode()).hexdigest()[:16]}"


VERSION = "{}.{}".format(*sys.version_info)
RECORDING = Recording()


def _parsed(file: Path) -> dict[str, list[tuple[str, str]]]:
    tests: dict[str, list[tuple[str, str]]] = {}
    request = ""
    for line in file.read_text().split("\n") if file.exists() else ():
        if line.startswith("["):
            said = tests.setdefault(line[1:-1], [])
        elif line.startswith("> "):
            request = line[2:]
        elif line.startswith("< "):
            said.append((request, line[2:]))
    return tests


def recorded(method: Callable[P, T]) -> Callable[P, T]:
    """Let a method return the recorded answer if no tritonserver is asked."""

    @functools.wraps(method)
    def asked(*args: P.args, **options: P.kwargs) -> T:
        recording: Recording | None = args[0].recording  # type: ignore[attr-defined]
        if recording is None:
            return method(*args, **options)
        words = [repr(shortened(_plain(each))) for each in args[1:]]
        words += [f"{name}={shortened(value)!r}" for name, value in sorted(options.items())]
        answer: T = recording.ask(f"{method.__name__}({', '.join(words)})", lambda: method(*args, **options))
        return answer

    return asked


def _plain(value: Any) -> Any:
    """Inputs as arrays, so that they are written with their datatypes and shapes."""
    if isinstance(value, dict):
        return {name: np.asarray(each) for name, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_plain(each) for each in value]
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="a folder; asks a tritonserver, and writes its answers there")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("record")
    RECORDING.folder = None if folder is None else config.rootpath / folder
