"""A Hub on loopback, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
from tests.hub.stand_in import Hub, running

from moonpool.runtime.repository import hub_store


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(hub_store, "_PAUSES_S", (0.01, 0.01))
    with running() as made:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", made.url)
        yield made
    huggingface_hub.close_session()
