"""A launcher, and models for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.triton.doubles import CONFIG, DOUBLES
from tests.runtime.triton.shim import Shim, Stub

from moonpool.runtime.triton.messages import Word

Write = Callable[..., Path]
Start = Callable[..., Stub]


@pytest.fixture
def shim() -> Iterator[Shim]:
    shim = Shim()
    yield shim
    shim.close()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "m") -> Path:
        (tmp_path / name / "1").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "1" / "model.py").write_text(text)
        return tmp_path / name

    return write


@pytest.fixture
def start(shim: Shim, write: Callable[[str], Path]) -> Start:
    """An instance of a model with this text."""

    def start(text: str = DOUBLES, config: dict[str, Any] = CONFIG) -> Stub:
        word, model, *said = shim.load(write(text), config)
        assert word == Word.MODEL_READY, said
        return shim.start(model)

    return start
