"""The same call on both sides, and that the answers are the same."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tests.triton.answers import Answer, Failure, Inputs, LogLine, Outcome
from tests.triton.moonpool_side import MoonpoolSide
from tests.triton.triton_side import TritonSide

# pybind11's refusals of arguments of a wrong type begin so. The rest is its own signatures.
PREFIX = "c_python_backend_utils."
PYBIND = ("incompatible constructor arguments", "incompatible function arguments")


class Before:
    """Chooses the lines before the one that has this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)

    def __call__(self, lines: list[LogLine]) -> list[LogLine] | None:
        texts = [line.text for line in lines]
        return lines[: texts.index(self._text)] if self._text in texts else None


class Both:
    """Both sides over one repository. A method that asks both asserts that they agree."""

    def __init__(self, triton: TritonSide, moonpool: MoonpoolSide) -> None:
        self.triton = triton
        self.moonpool = moonpool
        # The error of each model of the zoo: Triton's, then moonpool's.
        self.loads: dict[str, tuple[Failure | None, Failure | None]] = {}

    def infer(self, model: str, inputs: Inputs, **options: Any) -> Outcome:
        """The outcome, which is the same on both sides."""
        theirs = without_id(self.triton.infer(model, inputs, **options))
        ours = self.moonpool.infer(model, inputs, **options)
        assert ours == theirs
        return ours

    def answer(self, model: str, inputs: Inputs, **options: Any) -> Answer:
        """Infer on both sides, and return the response. Fails if there is an error."""
        outcome = self.infer(model, inputs, **options)
        assert isinstance(outcome, Answer), outcome
        return outcome

    def failure(self, model: str, inputs: Inputs, **options: Any) -> Failure:
        """Infer on both sides, and return the error. Fails if there is none."""
        outcome = self.infer(model, inputs, **options)
        assert isinstance(outcome, Failure), outcome
        return outcome

    def together(self, model: str, requests: Sequence[Inputs]) -> list[Outcome]:
        """The outcomes of requests that come at the same time, which are the same on both sides."""
        theirs = self.triton.together(model, requests)
        ours = self.moonpool.together(model, requests)
        assert ours == theirs
        return ours

    def stream(self, model: str, inputs: Inputs, **options: Any) -> list[Outcome]:
        """All responses, which are the same on both sides; of errors, the texts."""
        theirs = self.triton.stream(model, inputs, **options)
        ours = self.moonpool.stream(model, inputs, **options)
        assert ours == theirs
        return ours

    def load(self, model: str) -> Failure | None:
        """Load on both sides, and return the error, which must be the same, or None."""
        theirs = self.triton.load(model)
        ours = self.moonpool.load(model)
        assert ours == theirs
        return ours

    @contextlib.contextmanager
    def hosted(self, model: str) -> Iterator[None]:
        """The model, loaded on both sides."""
        assert self.triton.load(model) is None
        try:
            assert self.moonpool.load(model) is None
            try:
                yield
            finally:
                self.moonpool.unload(model)
        finally:
            self.triton.unload(model)

    def forget_log(self) -> None:
        """Begin anew: what was logged so far is nobody's concern."""
        self.triton.forget_log()
        self.moonpool.forget_log()

    def log(self, model: str) -> list[LogLine]:
        """Return the lines that the model logged since the last look. They must be the same on both sides.

        Lines come later than the answers to their requests, but in order. So this asks for one more line, and returns
        all before it.
        """
        code = "attempt(lambda: 'mark'); sender.send(y(0), FINAL)"
        if model == "speaks":
            code = "logger.log_info(repr('mark'))"
        ask = self.stream if model == "streams" else self.infer
        ask(model, {"CODE": np.array([code.encode()], object)})
        return self.log_until(repr("mark"))

    def log_until(self, text: str) -> list[LogLine]:
        """Return the lines logged since the last look and before this one. They must be the same on both sides."""
        theirs, ours = (side.lines(Before(text)) for side in (self.triton, self.moonpool))
        assert ours == theirs
        return ours

    def said(self, code: str, **options: Any) -> tuple[str, str]:
        """Run a piece of Python in the model `snippets`. Returns Triton's result, then moonpool's."""
        inputs = {"CODE": np.array([code.encode()], object)}
        return _word(self.triton.infer("snippets", inputs, **options)), self.ours(code, **options)

    def ours(self, code: str, **options: Any) -> str:
        """Run a piece of Python in moonpool alone, where it cannot be run in Triton."""
        inputs = {"CODE": np.array([code.encode()], object)}
        return _word(self.moonpool.infer("snippets", inputs, **options))


def without_id(outcome: Outcome) -> Outcome:
    """Triton's core begins some texts with the id of the request, which the caller knows."""
    if isinstance(outcome, Failure):
        return outcome._replace(text=re.sub(r"^\[request id: .*?\] ", "", outcome.text))
    return outcome


def agree(theirs: str, ours: str) -> bool:
    """Compare two texts. If pybind11 lists its signatures in one, compare the types of the exceptions only.

    Differences that docs/FIDELITY.md has rows for are left out: the module in the names of types, and in the
    errors of requests to other models the code and the id of the request.
    """
    if any(words in theirs for words in PYBIND):
        return ours.split(":")[0] == theirs.split(":")[0]
    return _comparable(ours) == _comparable(theirs)


def _comparable(word: str) -> str:
    word = word.replace(PREFIX, "")
    if "Model " in word:
        word = re.sub(r"TritonError\(__ErrorCode\.\w+, ", "TritonError(", word)
    return re.sub(r"\[request id: .*?\] ", "", word)


def _word(outcome: Outcome) -> str:
    if isinstance(outcome, Failure):
        return f"{outcome.code}: {outcome.text}"
    (said,) = outcome.outputs["SAID"].data
    return said.decode() if isinstance(said, bytes) else str(said)
