"""The folder that goes with the tree: what was compiled from other sources is left out, and said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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
    (built / "checksums.json").write_text(json.dumps({"ipc/_copy.abi3.so": ["moonpool.ipc._copy", "00000000"]}))

    assert prepared.put_into_tree() == ["ipc/_copy.abi3.so was compiled from other sources than this tree's"]
    assert (here.read_bytes() if here.exists() else None) == before


@pytest.mark.parametrize(
    ("checksums", "why"),
    [
        ({"ipc/_gone.abi3.so": ["moonpool.ipc._gone", "00000000"]}, "compiled from other sources"),
        ({"ipc/_copy.abi3.so": ["moonpool.ipc._copy", None]}, "is missing"),
        (["ipc/_copy.abi3.so"], "could not be put into the tree"),
    ],
    ids=["a module that this tree has not", "a file that is lost", "another form"],
)
def test_a_folder_of_another_tree_s_costs_only_what_is_compiled(
    checksums: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path))
    if isinstance(checksums, dict):
        for file, (module, checksum) in checksums.items():
            checksums[file] = [module, checksum or prepared.checksum(module)]
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "checksums.json").write_text(json.dumps(checksums))

    (said,) = prepared.put_into_tree()
    assert why in said


def test_packages_for_another_python_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path))
    place = prepared.packages() / "orjson"
    place.mkdir(parents=True)
    own = f"{sys.version_info[0]}{sys.version_info[1]}"

    (place / "orjson.cpython-39-x86_64-linux-gnu.so").touch()
    assert prepared.misfit() == f"the packages are for CPython 39, and this is {own}"
    (place / f"orjson.cpython-{own}-x86_64-linux-gnu.so").touch()
    assert prepared.misfit() == ""


def test_a_run_goes_on_without_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path / "nothing"))

    assert prepared.put_into_tree() == []
