"""Test what the log has of an exception in a request."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import moonpool

RAISES = """
from moonpool import Float32

class Raises:
    def __call__(self, X: Float32[1]) -> Float32[1]:
        raise ValueError("first\\nERROR:root:forged\\x1b[31m" + "x" * 2000)
"""
BRIEF = (
    "[m_0] Failed to process the request(s) for model 'm_0', message: ValueError: first\\nERROR:root:forged\\x1b[31mxxx"
)


@pytest.mark.parametrize(
    ("level", "option", "is_brief"),
    [
        ("strict", {}, True),
        ("strict", {"MOONPOOL_LOG_ERRORS": "full"}, False),
        ("standard", {}, False),
        ("standard", {"MOONPOOL_LOG_ERRORS": "line"}, True),
    ],
)
def test_an_exception_of_a_contained_model_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, level: str, option: dict[str, str], is_brief: bool
) -> None:
    file = tmp_path / "raises.py"
    file.write_text(RAISES)
    with moonpool.Runtime(sandbox=level) as runtime:
        runtime.load("m", file, options=option)
        caplog.clear()
        with pytest.raises(moonpool.ModelError, match="first") as raised:
            runtime.infer("m", {"X": np.ones(1, np.float32)})
    logged = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]

    # The caller gets all of it.
    assert "raises.py(6): __call__" in str(raised.value)
    assert not any("\n" in line or "\x1b" in line for line in logged)
    assert all(line.startswith("[m_0] ") for line in logged)
    if is_brief:
        (line,) = logged
        assert line.startswith(BRIEF)
        assert line.endswith("… (raises.py:6)")
        assert len(line) < 1500
    else:
        assert any("Traceback" in line for line in logged)
