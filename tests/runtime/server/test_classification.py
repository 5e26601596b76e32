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


def test_the_largest_come_first() -> None:
    scores = np.array([0.1, 0.7, 0.2], np.float32)

    assert classes(scores, 2, batches=False) == ((2,), ["0.700000:1", "0.200000:2"])


def test_each_row_of_a_batch_has_its_own() -> None:
    scores = np.array([[1, 3, 2], [6, 5, 4]], np.int32)

    assert classes(scores, 2, batches=True) == ((2, 2), ["3:1", "2:2", "6:0", "5:1"])


def test_labels_stand_behind() -> None:
    scores = np.array([1, 2, 3], np.uint8)

    assert classes(scores, 3, batches=False, labels=["cat", "dog"]) == (
        (3,),
        ["3:2", "2:1:dog", "1:0:cat"],
    )


def test_there_are_no_more_classes_than_values() -> None:
    assert classes(np.array([2.0, 1.0]), 5, batches=False) == ((2,), ["2.000000:0", "1.000000:1"])


def test_the_first_of_equal_classes_comes_first() -> None:
    assert classes(np.array([1, 1, 1], np.int8), 2, batches=False)[1] == ["1:0", "1:1"]


def test_the_largest_unsigned_number_is_not_negative() -> None:
    assert classes(np.array([0, 2**64 - 1], np.uint64), 1, batches=False)[1] == [f"{2**64 - 1}:1"]


def test_nothing_to_choose_from_gives_nothing() -> None:
    assert classes(np.empty((0, 3), np.float32), 2, batches=True) == ((0, 0), [])
    assert classes(np.empty((2, 0), np.float32), 2, batches=True) == ((2, 0), [])


@pytest.mark.parametrize("dtype", [np.bool_, np.float16, object])
def test_values_that_cannot_be_compared_are_an_error(dtype: type) -> None:
    with pytest.raises(
        ModelError, match="class result not available for output 'Y' due to unsupported type"
    ):
        classify("Y", WireTensor.of(np.zeros(1, dtype)), 1, batches=False)


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
    "The model repository of a server",
    "Labels come from the model's own directory, whatever its configuration says.",
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
