"""The folder that goes with the tree: what was compiled from other sources is left out, and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.card import prepared


def test_files_that_were_compiled_from_other_sources_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path))
    built = tmp_path / "built"
    built.mkdir()
    here = prepared.ROOT / "ipc" / "_copy.abi3.so"
    before = here.read_bytes() if here.exists() else None
    (built / "checksums.json").write_text(
        json.dumps({"ipc/_copy.abi3.so": ["moonpool.ipc._copy", "00000000"]})
    )

    assert prepared.put_into_tree() == [
        "ipc/_copy.abi3.so was compiled from other sources than this tree's"
    ]
    assert (here.read_bytes() if here.exists() else None) == before


def test_a_run_goes_on_without_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path / "nothing"))

    assert prepared.put_into_tree() == []
