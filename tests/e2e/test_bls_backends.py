"""Tests of requests from models to models of other backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, tensor
from tests.runtime.recorder import Recorder, config

from moonpool import Response, Runtime

pytestmark = pytest.mark.promise(
    "Requests between models",
    "A value that cannot be sent to another model is an error. The runtime learns that a model "
    "has released a block, even if the request that would have said so cannot be sent.",
)

CALLER: Config = {
    "input": [tensor("DO", "STRING", 1), tensor("X", "FP32", -1)],
    "output": [tensor("Y", "FP32", -1), tensor("SAID", "STRING", 1)],
}


@pytest.mark.usefixtures("undisturbed")
def test_an_answer_that_is_not_an_array_is_an_error(tmp_path: Path) -> None:
    """A backend that answers with anything."""
    backend = Recorder(execute=lambda _, requests: [Response({"Y": cast(Any, "no array")}) for _ in requests])
    with Runtime(backends=[backend]) as runtime:
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "model.py").touch()
        runtime.load("odd", tmp_path, config=config())
        runtime.load("caller", MODELS / "caller.py", config=CALLER)
        asked = {"DO": ['error{"model": "odd"}'], "X": np.zeros(1, np.float32)}
        for _ in range(2):
            said = runtime.infer("caller", asked, timeout_s=60.0)["SAID"][0].decode()
            assert said.startswith("INTERNAL: ")
