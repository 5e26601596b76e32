"""Python-based backends, as both sides import them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.triton.both import Both

pytestmark = pytest.mark.triton


def test_a_python_based_backend_is_told_the_same(both: Both) -> None:
    answer = both.answer("spoken", {"X": np.zeros(1, np.float32)})

    (text,) = answer.outputs["SAID"].data
    said = json.loads(text.decode() if isinstance(text, bytes) else str(text))
    assert said["path"] == ["backends/speaker", "backends/python"]
    assert said["dir"] == "spoken/1"
