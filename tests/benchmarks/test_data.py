"""The data of requests: what files may have, and what is refused."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.benchmarks.data import BadData, RequestData, WrongAnswer, read_capture, read_mix
from moonpool.runtime.client.request import QuestionTensor
from moonpool.runtime.model.config.model import TensorConfig

X = TensorConfig("X", "FP32", (2,))
TEXT = TensorConfig("TEXT", "BYTES", (-1,))


def read(path: Path, value: Any, *inputs: TensorConfig, is_batched: bool = True) -> list[Any]:
    """The arrays of each request in a file of perf_analyzer's."""
    file = path / "data.json"
    file.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    mix = read_mix([str(file)], inputs or (X,), {}, is_batched=is_batched)
    return [data.arrays() for data in mix.requests]


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ([1, 2], (1, 2)),
        ([[1, 2]], (1, 2)),
        ({"content": [1, 2, 3, 4], "shape": [4]}, (1, 4)),
        ({"b64": "AACAPwAAAEA="}, (1, 2)),
    ],
)
def test_tensors_have_the_forms_of_perf_analyzer(tmp_path: Path, value: object, shape: tuple[int, ...]) -> None:
    [found] = read(tmp_path, {"data": [{"X": value}]})

    assert found["X"].shape == shape
    assert found["X"].ravel()[:2].tolist() == [1, 2]


def test_texts_and_streams_are_read(tmp_path: Path) -> None:
    value = {"data": [[{"TEXT": ["a", "ü"]}, {"TEXT": ["b"]}], [{"TEXT": {"b64": "AAE="}}]]}
    found = read(tmp_path, value, TEXT, is_batched=False)

    assert [each["TEXT"].tolist() for each in found] == [[b"a", "ü".encode()], [b"b"], [b"\x00\x01"]]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        ([], "is not a JSON object"),
        ({"data": []}, "has no requests"),
        ({"data": [5]}, "is not an object"),
        ({"data": [{}]}, "lacks input 'X'"),
        ({"data": [{"X": [1, 2], "Y": [1]}]}, "has no input 'Y'"),
        ({"data": [{"X": [1, 2, 3]}]}, "not as given"),
        ({"data": [{"X": ["a", "b"]}]}, "not as given"),
        ({"data": [{"X": {"content": [1, 2], "shape": "2"}}]}, "has no shape"),
        ({"data": [{"X": {"content": [1, 2], "shape": [-2]}}]}, "has no shape"),
        ({"data": [{"X": {"b64": "?"}}]}, "not as given"),
        ({"data": [{"X": {"b64": "AA=="}}]}, "not as given"),
        ({"data": [{"X": None}]}, "not as given"),
        ({"data": [{"X": [1, 2]}], "validation_data": [{}, {}]}, "`validation_data` 2"),
        ({"data": [{"X": [1, 2]}], "validation_data": {}}, "is not a list"),
        ({"data": [{"X": [1, 2]}], "validation_data": [{"Y": None}]}, "not an array"),
    ],
)
def test_data_that_does_not_fit_is_refused(tmp_path: Path, value: object, why: str) -> None:
    with pytest.raises(BadData, match=why):
        read(tmp_path, value)


def test_an_answer_is_compared_by_its_values() -> None:
    data = RequestData([], {"Y": np.array([1.0, 2.0]), "N": np.array([1])})
    data.check({"Y": np.array([[1.0, 2.0000001]], np.float32), "N": np.array([[1]])}, "here")

    for wrong in (
        {"Y": np.array([1.0, 2.1]), "N": np.array([1])},
        {"Y": np.array([1.0]), "N": np.array([1])},
        {"Y": np.array([1.0, 2.0])},
    ):
        with pytest.raises(WrongAnswer):
            data.check(wrong, "here")


@pytest.mark.promise(
    "Measuring (`moonpool bench`)", "Requests can be mixed by weights from files of perf_analyzer and arrays of numpy."
)
def test_sources_are_mixed_by_their_weights(tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    folder.mkdir()
    for number in range(3):
        np.savez(folder / f"{number}.npz", X=np.full((1, 2), number, np.float32))
    (tmp_path / "data.json").write_text(json.dumps({"data": [{"X": [9, 9]}]}))

    mix = read_mix([f"{folder}=3", f"{tmp_path / 'data.json'}=1"], (X,), {}, is_batched=True)

    first = [float(data.arrays()["X"].ravel()[0]) for data in mix.requests]
    assert first == [0, 1, 2, 9]
    counts = Counter(mix.order.tolist())
    assert counts == {0: 250, 1: 250, 2: 250, 3: 250}
    # The sources take turns and do not come in blocks.
    assert 3 in mix.order[:4]


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def mix(spec: object, *inputs: TensorConfig) -> None:
        read_mix([str(spec)], inputs or (X,), {}, is_batched=True)

    file = tmp_path / "a.npz"
    np.savez(file, X=np.zeros(2))
    with pytest.raises(BadData, match="float64"):
        mix(file)
    np.savez(file, Y=np.zeros(2))
    with pytest.raises(BadData, match="has no input 'Y'"):
        mix(file)
    np.savez(file, TEXT=np.zeros(2))
    with pytest.raises(BadData, match="is BYTES"):
        mix(file, TEXT)
    np.savez(file, X=np.array([{}]))
    with pytest.raises(BadData, match="without Python objects"):
        mix(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("X.npy", b"not an array")
    with pytest.raises(BadData, match="'X' is not an array"):
        mix(file)
    file.write_bytes(b"no zip")
    with pytest.raises(BadData, match=r"no \.npz file"):
        mix(file)
    with pytest.raises(BadData, match="WEIGHT"):
        mix(f"{file}=much")
    with pytest.raises(FileNotFoundError):
        mix(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["{"], "is not JSON"),
        (["{}"], "its format is None"),
        (['{"format": 1}'], "no request to model 'm'"),
        (['{"format": 1}', "5", "{}"], "is not a JSON object"),
        (['{"format": 1}', '{"model": "m", "at_s": 0}'], "not a captured request"),
        (['{"format": 1}', '{"model": "m", "inputs": []}'], "no time"),
        (
            ['{"format": 1}', '{"model": "m", "at_s": 0, "inputs": [{"name": "X", "datatype": "FP32", "shape": [3], "b64": ""}]}'],
            "not a captured request",
        ),
    ],
)  # fmt: skip
def test_captures_that_are_none_are_refused(tmp_path: Path, lines: list[str], why: str) -> None:
    file = tmp_path / "capture"
    file.write_text("\n".join(lines))

    with pytest.raises(BadData, match=why):
        read_capture(file, "m", 1.0)


def test_a_tensor_of_bytes_keeps_its_elements() -> None:
    tensor = QuestionTensor.of("TEXT", "BYTES", np.array([b"a", b""], object))

    assert tensor.array().tolist() == [b"a", b""]
