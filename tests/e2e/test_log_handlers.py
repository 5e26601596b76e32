"""Handlers of the program's log that raise, or are stuck, take nothing from models and callers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import hosted, tensor

import moonpool
from moonpool.runtime.log import flush

PATIENCE_S = 60.0
# Prints and logs with each request, and ends its process if X is not 0.
MODEL = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        print("printed", flush=True)
        pb_utils.Logger.log_error("logged")
        if pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()[0]:
            os._exit(1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", each.inputs()[0].as_numpy())]) for each in requests]
"""
CONFIG = {"input": [tensor("X", "FP32", 1)], "output": [tensor("Y", "FP32", 1)]}
ZERO, ONE = ({"X": np.full(1, value, np.float32)} for value in (0, 1))


class Stuck(logging.Handler):
    """Waits with its lock held, as one whose pipe nobody reads, until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached, self.goes_on = threading.Event(), threading.Event()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.is_reached.set()
        self.goes_on.wait(PATIENCE_S)
        self.texts.append(record.getMessage())


class Raising(Stuck):
    """Raises what `logging` does not catch."""

    def emit(self, record: logging.LogRecord) -> None:
        self.is_reached.set()
        self.texts.append(record.getMessage())
        raise SystemExit(1)


@contextlib.contextmanager
def handled_by(handler: Stuck) -> Iterator[None]:
    logger = logging.getLogger("moonpool")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        handler.goes_on.set()
        flush(PATIENCE_S)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


@pytest.mark.promise("Log", "Records of the runtime are …")
@pytest.mark.promise("Log", "A handler that raises …")
@pytest.mark.parametrize("handler", [Stuck(), Raising()], ids=lambda each: type(each).__name__)
def test_models_are_served_and_come_back_whatever_a_handler_does(tmp_path: Path, handler: Stuck) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    with handled_by(handler):
        with moonpool.Runtime() as runtime, hosted(runtime, "m", file, CONFIG):
            # The reactor has a part in all of these: it reads what the model prints, drives requests of futures, and
            # sees a death.
            for _ in range(3):
                runtime.submit("m", ZERO).result(PATIENCE_S)
            assert handler.is_reached.wait(PATIENCE_S)
            with pytest.raises(moonpool.StubDied):
                runtime.submit("m", ONE).result(PATIENCE_S)
            runtime.submit("m", ZERO).result(PATIENCE_S)
            assert runtime.instances("m")[0]["restarts"] == 1
        handler.goes_on.set()
        flush(PATIENCE_S)
        assert handler.texts.count("[m_0] printed") == 5
        assert any("is not healthy" in text for text in handler.texts)
