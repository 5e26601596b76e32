"""moonpool, asked in this process, in the terms of the other side."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.triton.answers import Answer, Failure, Inputs, LogLine, Outcome, output_of
from tests.triton.server import BACKENDS
from tests.triton.triton_side import Chosen, at_once, lines_of

import moonpool
from moonpool import MoonpoolError
from moonpool.runtime.log import flush
from moonpool.runtime.server.metadata import Metadata

TIMEOUT_S = 60.0
_LINE = re.compile(r"^\[\w+\] (.*) \((model\.py:\d+)\)$", re.DOTALL)


class _Lines(logging.Handler):
    """Keeps the lines that models logged on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[LogLine] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = _LINE.match(record.getMessage())
        if found is not None:
            level = "I" if record.levelno <= logging.INFO else record.levelname[0]
            self.lines.append(LogLine(level, found[2], found[1]))


class MoonpoolSide:
    """One runtime over the same repository."""

    def __init__(self, repository: Path, **options: Any) -> None:
        """`options` are further ones of the runtime."""
        self._runtime = moonpool.Runtime(repository, models=[], backend_directory=BACKENDS, **options)
        self._lines = _Lines()
        self._heard = 0
        self._logger = logging.getLogger("moonpool.stub")
        self._logger.addHandler(self._lines)
        # Another one may hear this logger too, for longer, so its level is put back and not unset.
        self._level = self._logger.level
        self._logger.setLevel(logging.DEBUG)

    def close(self) -> None:
        self._runtime.close()
        self._logger.removeHandler(self._lines)
        self._logger.setLevel(self._level)

    def load(self, model: str) -> Failure | None:
        """Load a model of the repository; what hinders it, if anything does."""
        try:
            self._runtime.load(model)
        except MoonpoolError as error:
            return Failure(getattr(error, "code", "INTERNAL"), _words(error))
        return None

    def unload(self, model: str) -> None:
        self._runtime.unload(model)

    def ready(self, model: str) -> bool:
        return self._runtime.is_ready(model)

    def infer(self, model: str, inputs: Inputs, **options: Any) -> Outcome:
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        try:
            response = self._runtime.request(model, arrays, timeout_s=TIMEOUT_S, **options)
        except MoonpoolError as error:
            return Failure(error.code, str(error))
        return _answer(response)

    def stream(self, model: str, inputs: Inputs, **options: Any) -> list[Outcome]:
        """All responses to one request of a decoupled model; of errors, only the texts."""
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        outcomes: list[Outcome] = []
        try:
            stream = self._runtime.stream(model, arrays, timeout_s=TIMEOUT_S, **options)
        except MoonpoolError as error:
            return [Failure("", str(error))]
        while True:
            try:
                outcomes.append(_answer(next(stream)))
            except StopIteration:
                return outcomes
            except MoonpoolError as error:
                outcomes.append(Failure("", str(error)))

    def first_of_stream(self, model: str, inputs: Inputs) -> Outcome:
        """The first response to a request that is cancelled then."""
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        with self._runtime.stream(model, arrays, timeout_s=TIMEOUT_S) as stream:
            return _answer(next(stream))

    def config(self, model: str) -> dict[str, Any]:
        """The configuration as moonpool completed it, in its JSON form."""
        config: dict[str, Any] = json.loads(self._runtime.config(model).json)
        return config

    def metadata(self, model: str) -> dict[str, Any]:
        """The metadata in its JSON form, as a server has it."""
        return Metadata(self._runtime).model_metadata(model)

    def together(self, model: str, requests: Sequence[Inputs]) -> list[Outcome]:
        """The outcomes of requests that come at the same time."""
        return at_once(self.infer, model, requests)

    def metrics(self, pattern: str) -> list[Any]:
        """Return what `re.findall` finds in the lines of the exposition."""
        return sorted(re.findall(pattern, self._runtime.metrics(), re.MULTILINE))

    def counts(self, model: str) -> dict[str, Any]:
        """The statistics of a model that has one version."""
        return self._runtime.statistics(model)

    def lines(self, chosen: Chosen) -> list[LogLine]:
        """Wait until models have logged these lines since the last look, and return them."""
        return lines_of(self.log, chosen)

    def text_of(self, file: str) -> str:
        """The text of a file that a model has written."""
        return Path(file).read_text()

    def forget_log(self) -> None:
        """Let the next look begin here."""
        self.log()

    def log(self) -> list[LogLine]:
        """Return the lines that models logged since the last look."""
        flush()
        lines = self._lines.lines[self._heard :]
        self._heard += len(lines)
        return lines


def _words(error: MoonpoolError) -> str:
    return str(error)


def _answer(response: moonpool.Response) -> Answer:
    outputs = {name: output_of(array) for name, array in response.outputs.items()}
    return Answer(outputs, dict(response.parameters), response.request_id)
