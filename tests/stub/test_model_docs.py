"""Tests that the examples of the two pages on models run as printed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moonpool.stub.pb_utils as pb_utils
from moonpool.ipc.messages import NO_DETAILS
from moonpool.stub.loader import install_utilities, load_native, load_triton
from moonpool.stub.native.model import NativeAdapter, complete_config
from moonpool.stub.pb_utils import host
from moonpool.stub.pb_utils.config import ModelConfig

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [
    pytest.mark.usefixtures("imports"),
    pytest.mark.skipif(not DOCS.is_dir(), reason="only the tests are here, without the documents"),
    pytest.mark.promise("Models", "The examples in the documents on writing models run."),
]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def write(folder: Path, page: str) -> list[str]:
    """Write the blocks that begin with the name of a file, and return the others."""
    rest = []
    for block in blocks(page):
        named = re.match(r"# (\S+\.py)\n", block)
        if named:
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)
        else:
            rest.append(block)
    return rest


def request(**arrays: Any) -> pb_utils.InferenceRequest:
    tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
    return pb_utils.InferenceRequest.from_wire(NO_DETAILS, (), tensors)


def serve(file: Path, **config: Any) -> NativeAdapter:
    model = load_native(str(file))
    complete = complete_config(model, ModelConfig(json.dumps({"name": "m", **config})))
    adapter = NativeAdapter(model, complete.as_dict())
    adapter.initialize({"model_name": "m"})
    return adapter


ROWS = np.full((2, 4), 3, np.float32)


def test_the_model_written_for_triton_runs(tmp_path: Path) -> None:
    write(tmp_path, "TRITON_MODELS.md")
    model_dir = tmp_path / "add_sub"
    model_class: Any = load_triton("model.py", str(model_dir / "1"), str(model_dir), "")
    config = model_class.auto_complete_config(ModelConfig('{"name": "add_sub"}'))
    model = model_class()
    model.initialize({"model_config": json.dumps(config.as_dict())})
    good, bad = model.execute([request(INPUT0=ROWS, INPUT1=ROWS), request(INPUT0=ROWS * 1000, INPUT1=ROWS)])

    assert good.output_tensors()[0].as_numpy().tolist() == [[6] * 4] * 2
    assert bad.error().message() == "too large"


def test_the_other_examples_for_triton_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = write(tmp_path, "TRITON_MODELS.md")
    monkeypatch.chdir(tmp_path)
    install_utilities("")

    asked = Asked()
    host.use(asked)
    try:
        assert len(rest) == 3
        for block in rest:
            exec(compile(block, "TRITON_MODELS.md", "exec", dont_inherit=True), {})
    finally:
        host.use(None)
    assert asked.calls == ["ready other", "load other", "load other", "load new", "unload other"]


class Asked(host.Host):
    """Records what a model asks for, and does nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def is_model_ready(self, name: str, version: str) -> bool:  # noqa: ARG002
        self.calls.append(f"ready {name}")
        return False

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:  # noqa: ARG002
        self.calls.append(f"load {name}")

    def unload_model(self, name: str, unload_dependents: bool) -> None:  # noqa: ARG002
        self.calls.append(f"unload {name}")


def test_the_first_native_model_runs(tmp_path: Path) -> None:
    write(tmp_path, "NATIVE_MODELS.md")
    (response,) = serve(tmp_path / "add_sub.py").execute([request(A=ROWS, B=ROWS)])

    assert {t.name(): t.as_numpy().tolist() for t in response.output_tensors()} == {
        "SUM": [[6] * 4] * 2,
        "DIFFERENCE": [[0] * 4] * 2,
    }


def test_the_native_model_with_a_configuration_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "NATIVE_MODELS.md")
    adapter = serve(tmp_path / "scale.py", parameters={"factor": {"string_value": "2"}})
    (response,) = adapter.execute([request(X=ROWS)])
    adapter.finalize()

    assert response.output_tensors()[0].as_numpy().tolist() == [[6] * 4] * 2
    assert capsys.readouterr().out == "no more requests\n"


def test_the_native_model_for_type_checkers_runs(tmp_path: Path) -> None:
    write(tmp_path, "NATIVE_MODELS.md")
    (response,) = serve(tmp_path / "checked.py").execute([request(A=ROWS, B=ROWS)])

    assert response.output_tensors()[0].name() == "SUM"


def test_every_type_that_the_page_lists_exists() -> None:
    from moonpool.stub.native import hints

    page = (DOCS / "NATIVE_MODELS.md").read_text()
    for tensor in hints.TENSOR_TYPES:
        assert f"`{tensor.name}`" in page
