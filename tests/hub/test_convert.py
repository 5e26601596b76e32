"""Pickled weights become safetensors in a contained process, and nothing else comes of a pickle that attacks."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.hub import tiny
from tests.hub.stand_in import Hub
from tests.hub.test_models import Pickled, texts

import moonpool
from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.cli.main import main
from moonpool.runtime.cli.repositories import convert
from moonpool.runtime.repository.cloud_store import CloudFile
from moonpool.runtime.repository.hub_model import HubModel

needs_torch = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: bash .ci/run hub"),
    pytest.mark.timeout(900),
]


def with_torch(test: Any) -> Any:
    for mark in needs_torch:
        test = mark(test)
    return test


def saved(value: object, **more: Any) -> bytes:
    import torch

    made = io.BytesIO()
    torch.save(value, made, **more)
    return made.getvalue()


def pickled(shards: int = 1, **more: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return a classifier whose weights are pickles, and its tensors."""
    from safetensors.torch import load

    files = tiny.classifier()
    tensors = load(files.pop("model.safetensors"))
    if shards == 1:
        return files | {"pytorch_model.bin": saved(tensors, **more)}, tensors
    names = [f"pytorch_model-{number:05d}-of-{shards:05d}.bin" for number in range(1, shards + 1)]
    parts = [dict(list(tensors.items())[number::shards]) for number in range(shards)]
    index = {"weight_map": {name: file for file, part in zip(names, parts, strict=True) for name in part}}
    files |= {name: saved(part, **more) for name, part in zip(names, parts, strict=True)}
    return files | {"pytorch_model.bin.index.json": json.dumps(index).encode()}, tensors


@with_torch
@pytest.mark.promise(
    "Models of the Hub",
    "`moonpool convert` makes safetensors of pickled weights in a process at `strict`, if their commit is granted.",
)
@pytest.mark.parametrize(
    ("shards", "form"), [(1, {}), (1, {"_use_new_zipfile_serialization": False}), (2, {})], ids=["one", "old", "shards"]
)
def test_pickled_weights_become_a_model(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], shards: int, form: dict[str, Any]
) -> None:
    from safetensors import safe_open

    files, tensors = pickled(shards, **form)
    commit = hub.put("o/m", files)
    models = tmp_path / "models"
    assert main(["convert", "hf://o/m", str(models), "--pickled-weights", commit]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.endswith("now without pickles\n")
    assert [path.name for path in models.iterdir()] == ["m"]
    assert not list(models.rglob("*.bin*"))
    found: dict[str, Any] = {}
    for path in models.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    assert found.keys() == tensors.keys()
    assert all((found[name] == each).all() for name, each in tensors.items())

    with moonpool.Runtime(models, sandbox="strict") as runtime:
        assert runtime.infer("m", {"TEXT": texts(b"the cat is good")})["SCORE"].shape == (1, 3)
    # The folder is not written over.
    assert main(["convert", "hf://o/m", str(models), "--pickled-weights", commit]) == 2


@with_torch
@pytest.mark.promise(
    "Models of the Hub",
    "A pickle that would call something is refused by the name of that, and nothing of it is written.",
)
@pytest.mark.parametrize("is_archive", [True, False], ids=["", "old"])
def test_a_pickle_that_attacks_leaves_nothing(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_archive: bool
) -> None:
    files, tensors = pickled()
    attack = tensors | {"evil": Pickled(str(tmp_path / "mark"))}
    files["pytorch_model.bin"] = saved(attack, _use_new_zipfile_serialization=is_archive)
    commit = hub.put("o/m", files)
    assert main(["convert", "hf://o/m", str(tmp_path / "models"), "--pickled-weights", commit]) == 1
    said = capsys.readouterr().err
    assert "pytorch_model.bin was not unpickled: it would call " in said
    # Of the old form, the first name is known, and not all.
    assert ("Path" if is_archive else "getattr") in said
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "models").exists()


@with_torch
@pytest.mark.parametrize(
    ("made", "error"),
    [
        (lambda torch: [torch.ones(2)], "holds list, where weights are a dictionary"),
        (lambda _: {"a": 3}, "has int at 'a'"),
        (lambda torch: {"a": torch.ones(2, 2).to_sparse()}, "safetensors has no tensors such as 'a'"),
        (lambda torch: {"a": torch.ones(1).expand(1 << 40)}, r"its tensors have 4,398,046,511,104 bytes"),
    ],
)
def test_a_pickle_of_something_else_is_refused(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], made: Callable[[Any], object], error: str
) -> None:
    import torch

    files, _ = pickled()
    commit = hub.put("o/m", files | {"pytorch_model.bin": saved(made(torch))})
    assert main(["convert", "hf://o/m", str(tmp_path / "models"), "--pickled-weights", commit]) == 1
    assert error in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


CONFIG = json.dumps({"architectures": ["TinyForSequenceClassification"]}).encode()


def test_a_grant_is_needed_and_names_the_commit(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"config.json": CONFIG, "pytorch_model.bin": b"pickle"}
    first = hub.put("o/m", files)
    commit = hub.put("o/m", files | {"README.md": b"more"})
    for grant in ([], ["--pickled-weights", first]):
        assert main(["convert", "hf://o/m", str(tmp_path / "models"), *grant]) == 1
        assert f"moonpool convert hf://o/m@{commit} FOLDER --pickled-weights={commit}" in capsys.readouterr().err
    assert not [path for path in hub.fetched if path.endswith(".bin")]
    assert not (tmp_path / "models").exists()


def test_there_may_be_nothing_to_convert(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.put("o/m", {"config.json": CONFIG, "model.safetensors": b"weights"})
    assert main(["convert", "hf://o/m", str(tmp_path)]) == 1
    assert "has its weights in safetensors: there is nothing to convert" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
    for address in ("s3://o/m", "hf://o/m/sub", "hf://o/..", "hf://o/.m", "m"):
        assert main(["convert", address, str(tmp_path)]) in (1, 2)


# What a process that was taken over may say. None of it is a file of ours.

GOOD = [["a", "F32", [2]], ["b", "U8", [3]]]
LISTS: list[tuple[object, str]] = [
    ({}, "no tensors"),
    ([], "no tensors"),
    ([["a", "F32"]], "no fitting name"),
    ([[7, "F32", [2]]], "no fitting name"),
    ([["a" * 1001, "F32", [2]]], "no fitting name"),
    ([["__metadata__", "F32", [2]]], "no fitting name"),
    ([["a", "F128", [2]]], "the datatype 'F128'"),
    ([["a", [], [2]]], "the datatype"),
    ([["a", "F32", 2]], "no shape"),
    ([["a", "F32", [1] * 65]], "no shape"),
    ([["a", "F32", [-1]]], "not a size"),
    ([["a", "F32", [True]]], "not a size"),
    ([["a", "F32", [1.0]]], "not a size"),
    ([["a", "F32", [1 << 60]]], "not a size"),
    ([["a", "F32", [1 << 40, 0, 1 << 40]], ["b", "F32", [1 << 40]]], "are the most"),
    ([["a", "F32", [2]], ["a", "F32", [2]]], "a name twice"),
]


def written(tmp_path: Path, ask: Callable[[str, int, int, int], bytes]) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (source / name).write_bytes(b"{}")
    files = tuple(CloudFile(name, 2, "", "") for name in ("config.json", "pytorch_model.bin"))
    target = tmp_path / "models" / "m"
    convert.write_model(target, HubModel("hf://o/m", "0" * 40, "rerank", files, "", ()), source, ask)
    return target


def test_what_is_handed_over_is_written(tmp_path: Path) -> None:
    content = {0: b"12345678", 1: b"abc"}

    def ask(_: str, number: int, start: int, count: int) -> bytes:
        return json.dumps(GOOD).encode() if number < 0 else content[number][start : start + count]

    target = written(tmp_path, ask)
    text = (target / "1" / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", text[:8])
    assert json.loads(text[8 : 8 + size])["b"] == {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]}
    assert size % 8 == 0
    assert text[8 + size :] == b"12345678abc"
    assert sorted(path.name for path in (target / "1").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("said", "error"), LISTS)
def test_a_list_that_lies_is_refused(tmp_path: Path, said: object, error: str) -> None:
    with pytest.raises(MoonpoolError, match=error):
        written(tmp_path, lambda *_: json.dumps(said).encode())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"\xff", b" " * (33 << 20)])
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(MoonpoolError, match="the list of tensors is wrong"):
        written(tmp_path, lambda *_: text)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("piece", [b"", b"1234567", b"123456789", b"1" * 100])
def test_another_count_of_bytes_is_refused(tmp_path: Path, piece: bytes) -> None:
    with pytest.raises(MoonpoolError, match=r"bytes came of 'a', not 8"):
        written(tmp_path, lambda _, number, *__: json.dumps(GOOD).encode() if number < 0 else piece)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
