"""The best classes of an output."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.runtime.errors import ModelError, ModelNotFound
from moonpool.runtime.model.request import WireTensor
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.server.inference.response import classify, read_labels
from moonpool.runtime.server.inference.tensors import to_values

pytestmark = pytest.mark.promise(
    "Tensors and requests of clients",
    "The best classes of an output come in Triton's form, with labels where the model has some.",
)


def nobody(name: str, _version: int | None) -> Any:
    raise ModelNotFound(f"nobody asks for '{name}'")


def classes(array: np.ndarray, count: int, **options: Any) -> tuple[tuple[int, ...], list[Any]]:
    made = classify("Y", WireTensor.of(array), count, **options)
    return made.shape, to_values("Y", made)


def model(tmp_path: Any, filename: str) -> Any:
    source = ModelSource("triton", tmp_path / "1" / "model.py", None, tmp_path, tmp_path / "1")
    raw = {"output": [{"name": "Y", "label_filename": filename}]}
    config = SimpleNamespace(raw=raw, ensemble=None)
    return SimpleNamespace(config=config, source=source)


def test_labels_are_the_lines_of_the_file(tmp_path: Any) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")

    assert read_labels(nobody, model(tmp_path, "labels.txt"), "Y") == ["cat", "dog"]
    assert read_labels(nobody, model(tmp_path, ""), "Y") == []
    assert read_labels(nobody, model(tmp_path, "labels.txt"), "Z") == []
    with pytest.raises(ModelError, match="cannot read the labels of output 'Y'"):
        read_labels(nobody, model(tmp_path, "nothing.txt"), "Y")


@pytest.mark.promise(
    "The model repository of a server", "Labels come from the model's own directory, whatever its configuration says."
)
def test_labels_come_from_the_models_directory_alone(tmp_path: Any) -> None:
    (tmp_path / "secret").write_text("secret\n")
    folder = tmp_path / "model"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "labels.txt").write_text("cat\n")
    (folder / "inside.txt").symlink_to("data/labels.txt")
    (folder / "outside.txt").symlink_to("../secret")
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / "labels.txt").write_text("dog\n")
    (folder / "1").symlink_to("../version")
    os.mkfifo(folder / "pipe.txt")
    with (folder / "huge.txt").open("wb") as file:
        file.truncate(1 << 40)

    assert read_labels(nobody, model(folder, "inside.txt"), "Y") == ["cat"]
    assert read_labels(nobody, model(folder, "1/labels.txt"), "Y") == ["dog"]
    for filename in ("outside.txt", "../secret", str(tmp_path / "secret")):
        with pytest.raises(ModelError, match=r"'Y': their file is not in the model's directory$"):
            read_labels(nobody, model(folder, filename), "Y")
    for filename in ("pipe.txt", "huge.txt", "a\0b", "data"):
        with pytest.raises(ModelError, match="cannot read the labels of output 'Y': "):
            read_labels(nobody, model(folder, filename), "Y")
