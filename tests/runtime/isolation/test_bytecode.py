"""Bytecode of moonpool's own files, which contained instances read and cannot write."""

from __future__ import annotations

import compileall
import sys
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import Config, hosted, options, tensor

import moonpool
from moonpool.runtime.isolation import paths, plan

pytestmark = pytest.mark.promise(
    "Layers of the sandbox",
    "An instance that may not write bytecode finds the bytecode of moonpool's own files. "
    "The runtime writes it once, if Python may.",
)

MODEL = """
import sys, triton_python_backend_utils as pb_utils, numpy as np

def compiled():
    for name, module in list(sys.modules.items()):
        if name.startswith("moonpool.") and getattr(module, "__cached__", None):
            with open(module.__cached__, "rb"):
                yield name

class TritonPythonModel:
    def execute(self, requests):
        names = np.array([name.encode() for name in compiled()], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", names)]) for _ in requests]
"""
CONFIG: Config = {"input": [tensor("X", "FP32", 1)], "output": [tensor("Y", "STRING", -1)]}
STUB = Path(paths.__file__).resolve().parents[2] / "stub"
Keep = Callable[[], None]


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keep:
    """`keep_bytecode` of a process in which it was not called yet, and whose bytecode lies in a folder of its own."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "kept"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    again = paths.keep_bytecode.__wrapped__
    monkeypatch.setattr(plan, "keep_bytecode", again)
    return again


def test_all_files_of_a_stub_are_compiled(keep: Keep) -> None:
    keep()

    assert all(Path(cache_from_source(str(file))).exists() for file in STUB.rglob("*.py"))


def test_where_python_writes_no_bytecode_none_is_written(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    keep()

    assert not (tmp_path / "kept").exists()


def test_where_it_cannot_be_kept_nothing_is_compiled(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(compileall, "compile_dir", lambda *_, **__: compiled.append(_))
    (tmp_path / "kept").touch()
    keep()

    assert compiled == []


@pytest.mark.usefixtures("keep")
def test_an_instance_that_may_write_none_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(kept))
    (tmp_path / "model.py").write_text(MODEL)
    config = CONFIG | options(SANDBOX="strict", SANDBOX_PATHS=kept)

    with moonpool.Runtime() as runtime, hosted(runtime, "compiled", tmp_path / "model.py", config):
        (names,) = runtime.infer("compiled", {"X": np.zeros(1, np.float32)}).values()

    assert {b"moonpool.stub.loop", b"moonpool.stub.sandbox.seccomp"} <= set(names)
