"""`moonpool infer`: what it takes, what it prints, what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.cli.shell import MODELS, CommandLine, write_kinds, write_model

from moonpool import InvalidRequest
from moonpool.runtime.cli.inputs import as_arrays, made_up, parse_inputs
from moonpool.runtime.cli.shared import UsageError
from moonpool.runtime.model.config.model import ModelConfig


def test_outputs_are_printed_with_datatype_and_shape(cli: CommandLine) -> None:
    ended = cli("infer", MODELS, "add_sub", "--input", "INPUT0=[[1,2,3,4]]", "--input", "INPUT1=[[5,6,7,8]]")

    assert ended.stdout == ("OUTPUT0  FP32 [1,4]\n[[ 6.  8. 10. 12.]]\nOUTPUT1  FP32 [1,4]\n[[-4. -4. -4. -4.]]\n")
    assert ended.stderr == ""
    assert ended.returncode == 0


def test_files_go_in_and_come_out(cli: CommandLine) -> None:
    rows = np.array([[1, 2, 3], [7, 7, 7]], np.float32)
    np.save(cli.folder / "rows.npy", rows)

    ended = cli("infer", MODELS, "normalise", "--input", "X=@rows.npy", "--output-dir", "new/results")

    assert ended.stdout == "new/results/Y.npy\n"
    result = np.load(cli.folder / "new" / "results" / "Y.npy", allow_pickle=False)
    expected = np.array([[-1.2247449, 0.0, 1.2247449], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_texts_come_out_as_json(cli: CommandLine) -> None:
    ended = cli("infer", MODELS, "crashes", "--input", 'WISH=[["für Elise"]]', "--json")

    assert json.loads(ended.stdout) == {"ANSWER": [["alive: für Elise"]]}


@pytest.mark.promise("HTTP", "A parameter of a request or …")
@pytest.mark.parametrize("datatype", ["FP32", "FP16"])
def test_nan_and_infinities_are_printed_as_texts(cli: CommandLine, datatype: str) -> None:
    kind = {"FP32": "Float32", "FP16": "Float16"}[datatype]
    write_model(
        cli.folder / "models",
        "same",
        f"from moonpool import {kind}\n\n\nclass Same:\n"
        f"    def __call__(self, X: {kind}[:]) -> {kind}[:]:\n        return X\n",
    )
    np.save(cli.folder / "x.npy", np.array([1, np.nan, np.inf, -np.inf], kind.lower()))

    ended = cli("infer", "models", "same", "--input", "X=@x.npy", "--json")

    assert list(json.loads(ended.stdout, parse_constant=pytest.fail).values()) == [
        [1.0, "NaN", "Infinity", "-Infinity"]
    ]


def test_texts_come_out_as_a_file_without_pickle(cli: CommandLine) -> None:
    cli("infer", MODELS, "crashes", "--input", 'WISH=[["a"]]', "--output-dir", ".")

    assert np.load(cli.folder / "ANSWER.npy", allow_pickle=False).tolist() == [[b"alive: a"]]


def test_an_exception_is_shown_once_with_its_place(cli: CommandLine) -> None:
    ended = cli("infer", MODELS, "crashes", "--input", 'WISH=[["raise"]]')

    assert ended.returncode == 1
    assert ended.stderr.count("ValueError: as you wish") == 1
    assert "crashes/1/model.py(" in ended.stderr


def test_a_timeout_is_a_failure(cli: CommandLine) -> None:
    ended = cli("infer", MODELS, "hangs", "--input", "SECONDS=[[60]]", "--timeout", "0.01")

    assert ended.returncode == 1
    assert ended.stderr == "moonpool: error: Request timeout expired\n"


def test_an_output_cannot_choose_another_folder(cli: CommandLine) -> None:
    write_model(
        cli.folder / "models",
        "escape",
        "class M:\n    def __call__(self):\n        return {'../out': [1.0]}\n",
        'output { name: "../out" data_type: TYPE_FP32 dims: 1 }',
    )

    ended = cli("infer", "models", "escape", "--output-dir", "results")

    assert ended.returncode == 1
    assert "'../out'" in ended.stderr
    assert not (cli.folder / "out.npy").exists()


@pytest.mark.promise(
    "The command line",
    "`moonpool infer` asks models of each kind, in this process and over HTTP and gRPC: it prints each response of "
    "decoupled models and ensembles, and makes a whole sequence of a request to a model with sequences.",
)
def test_models_of_each_kind_are_asked(cli: CommandLine) -> None:
    write_kinds(cli.folder / "models")

    for model in ("counts", "steps"):
        ended = cli("infer", "models", model, "--input", "X=[2]")
        assert ended.stdout == "response 1\nN  INT32 [1]\n[0]\nresponse 2\nN  INT32 [1]\n[1]\n"
    ended = cli("infer", "models", "counts", "--input", "X=[2]", "--json")
    assert ended.stdout == '{"N": [0]}\n{"N": [1]}\n'
    ended = cli("infer", "models", "counts", "--input", "X=[2]", "--output-dir", "out")
    assert ended.stdout == "out/1/N.npy\nout/2/N.npy\n"
    ended = cli("infer", "models", "sums", "--input", "X=[[5]]")
    assert ended.stdout == "Y  INT32 [1,1]\n[[5]]\n"
    ended = cli("infer", "models", "sums", "--input", "X=[[5]]", "--sequence", "7")
    assert "sequence 7 to model 'sums' must specify the START flag" in ended.stderr


def test_a_response_cache_that_is_missing_is_told_with_the_command_that_has_one(cli: CommandLine) -> None:
    write_model(
        cli.folder / "models",
        "cached",
        "from moonpool import Float32\n\n\nclass Cached:\n"
        "    def __call__(self, X: Float32[1]) -> Float32[1]:\n        return X\n",
        "response_cache { enable: true }",
    )

    ended = cli("infer", "models", "cached", "--input", "X=[1]")

    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == (
        "model 'cached' asks for a response cache, but there is no cache: commands keep no responses, "
        "`moonpool serve` does with --cache-config=local,size=BYTES\n"
    )


CONFIG = ModelConfig.from_dict(
    {
        "name": "m",
        "backend": "python",
        "max_batch_size": 8,
        "input": [
            {"name": "F", "data_type": "TYPE_FP32", "dims": [2, -1]},
            {"name": "I", "data_type": "TYPE_INT8", "dims": [1]},
            {"name": "U", "data_type": "TYPE_UINT64", "dims": [1]},
            {"name": "B", "data_type": "TYPE_BOOL", "dims": [1]},
            {"name": "T", "data_type": "TYPE_STRING", "dims": [1]},
        ],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}],
    }
)


def given(argument: str) -> np.ndarray:
    (array,) = as_arrays(parse_inputs([argument]), CONFIG).values()
    return array


@pytest.mark.parametrize(
    ("argument", "dtype", "values"),
    [
        ("F=[[1,2.5]]", np.float32, [[1, 2.5]]),
        ("F=[[NaN, Infinity]]", np.float32, [[np.nan, np.inf]]),
        ("F=[]", np.float32, []),
        ("I=[-128,127]", np.int8, [-128, 127]),
        ("U=[18446744073709551615]", np.uint64, [2**64 - 1]),
        ("B=[true,false]", np.bool_, [True, False]),
        ('T=[["a=b"],["ü"]]', np.object_, [[b"a=b"], ["ü".encode()]]),
        ('T="one"', np.object_, b"one"),
    ],
)
def test_json_becomes_an_array_of_the_input_s_datatype(argument: str, dtype: type, values: object) -> None:
    array = given(argument)

    assert array.dtype == dtype
    np.testing.assert_array_equal(array, np.array(values, dtype))


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("I=[1.5]", "whole numbers"),
        ("I=[128]", "INT8"),
        ("U=[-1]", "UINT64"),
        ("B=[1]", "true and false"),
        ("F=[[1],[1,2]]", "FP32"),
        ('F=["1"]', "numbers"),
        ("F=null", "numbers"),
        ("T=[1]", "strings"),
        ('T=[["a"],["b","c"]]', "strings"),
        ("NO=1", "no input 'NO'; it has F FP32 [-1, 2, -1], I INT8 [-1, 1]"),
    ],
)
def test_json_that_does_not_fit_is_refused(argument: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        given(argument)

    assert why in str(refused.value)


def test_a_file_with_python_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "objects.npy"
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)

    with pytest.raises(UsageError, match="Python objects"):
        parse_inputs([f"X=@{path}"])


@pytest.mark.parametrize("content", [b"", b"no array"])
def test_a_file_that_is_no_array_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)

    with pytest.raises(UsageError, match=r"x\.npy"):
        parse_inputs([f"X=@{path}"])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"gone\.npy: No such file"):
        parse_inputs(["X=@gone.npy"])


def test_the_same_input_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_inputs(["X=1", "X=2"])


def test_made_up_inputs_fit_the_configuration() -> None:
    arrays = made_up(CONFIG, 3, {"F": (2, 5)})

    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "F": ("float32", (3, 2, 5)),
        "I": ("int8", (3, 1)),
        "U": ("uint64", (3, 1)),
        "B": ("bool", (3, 1)),
        "T": ("object", (3, 1)),
    }


@pytest.mark.promise("The server (`moonpool serve`)", "`check`, `infer` and `bench` host models …")
def test_a_model_is_hosted_as_the_operator_says(cli: CommandLine) -> None:
    """The command fails where the model may open what `strict` keeps it from, or is not where the option puts it."""
    data = cli.folder / "data"
    data.write_text("7")
    data.chmod(0o644)
    reads = (
        "from moonpool import Float32\n\n\nclass Reads:\n"
        "    def __call__(self, X: Float32[:]) -> Float32[:]:\n"
        f"        return X * float(open({str(data)!r}).read())\n"
    )
    write_model(cli.folder / "models", "reads", reads)
    asked = ("infer", "models", "reads", "--input", "X=[2]", "--sandbox=strict")

    refused = cli(*asked)
    assert refused.returncode != 0
    assert f"MOONPOOL_SANDBOX_PATHS=ro:{data} would allow it" in refused.stderr
    granted = cli(*asked, f"--model-option=r*:MOONPOOL_SANDBOX_PATHS={data}")
    assert "14." in granted.stdout
    ended = cli(*asked, "--model-option=reads:MOONPOOL_SANDBOX_PATH=/")
    assert (ended.returncode, 'did you mean "MOONPOOL_SANDBOX_PATHS"' in ended.stderr) == (2, True)
