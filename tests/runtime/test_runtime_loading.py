"""Tests of loading from Python: directories, files, classes, versions, interpreters, and several runtimes at once."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.inside import registry_of
from tests.refused_threads import refuse_threads
from tests.runtime.adders import CONFIG, repository, rows, runtime, write_model
from tests.runtime.recorder import PATIENCE_S, tensor
from tests.waiting import wait_until

import moonpool
from moonpool import Runtime, testing

__all__ = ["repository", "runtime"]

ROOT = Path(__file__).parents[2]
NATIVE = """
import numpy as np
from moonpool import Batch, Float32, Int32, Outputs


class Doubler:
    max_batch_size = 16

    def __call__(self, X: Float32[Batch, :]) -> Outputs(Y=Float32[Batch, :], ROWS=Int32[Batch, 1]):
        return {"Y": X * 2, "ROWS": np.full((len(X), 1), len(X), np.int32)}
"""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("native") / "doubler.py"
    file.write_text(NATIVE)
    return file


@pytest.mark.promise("At the limits", "If no thread can be started …")
def test_an_unload_for_which_there_was_no_thread_can_be_asked_for_again(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Runtime(repository, models=["add"]) as runtime:
        models = registry_of(runtime)
        with models._locks.hold("add"):  # a load would hold this lock
            with monkeypatch.context() as patch:
                refuse_threads(patch)
                with pytest.raises(moonpool.OutOfThreads, match="can't start new thread"):
                    models.begin_unload("add")
            models.begin_unload("add")
        wait_until(lambda: not runtime.models())


def test_a_model_can_be_unloaded_and_loaded_again(repository: Path) -> None:
    with Runtime(repository, models=["add"]) as runtime:
        first = runtime.instances("add")[0]["pid"]
        runtime.unload("add")
        assert runtime.models() == {}
        assert not os.path.exists(f"/proc/{first}")
        with pytest.raises(moonpool.ModelNotFound, match="'add' has no available versions"):
            runtime.infer("add", rows(1))
        with pytest.raises(moonpool.ModelNotFound, match="'add' has no available versions"):
            runtime.empty("add", "A", 1)
        with pytest.raises(moonpool.ModelNotFound, match="'add' is not loaded"):
            runtime.unload("add")
        runtime.load("add", instances=2)
        assert len(runtime.instances("add")) == 2
        assert runtime.infer("add", rows(1))["SUM"].tolist() == [[2]]


def test_one_directory_can_be_loaded_under_several_names(repository: Path) -> None:
    with Runtime() as runtime:
        for name in ("one", "other"):
            runtime.load(name, repository / "add", config={"max_batch_size": 2})
        assert runtime.config("one").max_batch_size == 2
        for name in ("one", "other"):
            assert runtime.infer(name, rows(1))["SUM"].tolist() == [[2]]
            with pytest.raises(moonpool.InvalidRequest, match="batch-size must be <= 2"):
                runtime.infer(name, {k: np.ones((3, 1), np.float32) for k in "AB"})


def test_a_runtime_without_a_repository_wants_a_source() -> None:
    with Runtime() as runtime, pytest.raises(moonpool.ModelNotFound, match="has no repository"):
        runtime.load("anything")


def test_a_file_of_moonpools_own_kind_needs_no_configuration(native: Path) -> None:
    with Runtime() as runtime:
        runtime.load("doubler", native, instances=2)
        config = runtime.config("doubler")
        assert config.max_batch_size == 16
        assert [(t.name, t.datatype, t.dims) for t in config.inputs] == [("X", "FP32", (-1,))]
        assert [t.name for t in config.outputs] == ["Y", "ROWS"]
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        outputs = runtime.infer("doubler", {"X": x})
        assert outputs["Y"].tolist() == (x * 2).tolist()
        assert outputs["ROWS"].tolist() == [[2], [2]]


def test_a_model_of_moonpools_own_kind_is_called_once_for_a_batch(native: Path) -> None:
    policy = {"preferred_batch_size": [6], "max_queue_delay_microseconds": 60_000_000}
    with Runtime() as runtime:
        runtime.load("doubler", native, config={"dynamic_batching": policy})
        inputs = [np.full((n, 2), n, np.float32) for n in (1, 2, 3)]
        futures = [runtime.submit("doubler", {"X": x}) for x in inputs]
        for x, future in zip(inputs, futures, strict=True):
            outputs = future.result(PATIENCE_S).outputs
            assert outputs["Y"].tolist() == (x * 2).tolist()
            assert outputs["ROWS"].tolist() == [[6]] * len(x)


def test_a_class_is_loaded_from_its_file() -> None:
    config = {"input": [tensor("X", "FP32", -1)], "output": [tensor("OUTPUT0", "FP32", -1)]}
    with Runtime() as runtime:
        runtime.load("squarer", _square(), config=config)
        outputs = runtime.infer("squarer", {"X": np.array([3, 4], np.float32)})
        assert outputs["OUTPUT0"].tolist() == [9, 16]


def _square() -> type:
    """Write the class into its own module: a stub's interpreter need not have what this file imports."""
    folder = Path(__file__).parents[1] / "models"
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module("square")
    finally:
        sys.path.remove(str(folder))
    square = module.Square
    assert isinstance(square, type)
    return square


TWO = """
from moonpool import Batch, Float32

class A:
    def __call__(self, X: Float32[Batch, 1]) -> Float32[Batch, 1]:
        return X + 1

class B:
    def __call__(self, X: Float32[Batch, 1]) -> Float32[Batch, 1]:
        return X + 2

def triple(X: Float32[Batch, 1]) -> Float32[Batch, 1]:
    return 3 * X
"""


@pytest.mark.promise(
    "Models",
    "One of several classes in a file, or a function in it, is named as `two.py:A`, also in a directory's "
    "configuration, or given itself.",
)
@pytest.mark.parametrize("is_in_stub", [True, False])
def test_a_class_or_a_function_of_a_file_is_named(tmp_path: Path, *, is_in_stub: bool) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "two.py").write_text(TWO)
    spec = importlib.util.spec_from_file_location("two_of_a_test", folder / "1" / "two.py")
    assert spec is not None
    assert spec.loader is not None
    two = importlib.util.module_from_spec(spec)
    sys.modules["two_of_a_test"] = two
    spec.loader.exec_module(two)
    load = testing.load_in_stub if is_in_stub else testing.load
    sources: list[tuple[Any, float]] = [
        (f"{folder}/1/two.py:A", 6),
        (folder / "1" / "two.py:triple", 15),
        (two.B, 7),
        (two.triple, 15),
    ]
    for source, answer in sources:
        with load(source, name="m") as model:
            assert model.infer(X=[[5]])["OUTPUT0"].tolist() == [[answer]]
    with pytest.raises(moonpool.LoadFailed, match=r"name the one to use: 'two\.py:B'"):
        load(folder / "1" / "two.py")
    (folder / "1" / "two.py").rename(folder / "1" / "model.py")
    with load(folder, config={"default_model_filename": "model.py:A"}) as model:
        assert model.infer(X=[[5]])["OUTPUT0"].tolist() == [[6]]
    (folder / "config.pbtxt").write_text('default_model_filename: "model.py:B"')
    with load(folder) as model:
        assert model.infer(X=[[5]])["OUTPUT0"].tolist() == [[7]]


def test_what_is_no_source_of_a_model_is_named() -> None:
    bad: list[tuple[Any, str]] = [
        (len, "a builtin_function_or_method is not a source of a model"),
        (lambda x: x, "<lambda> is defined inside a function"),
    ]
    with Runtime() as runtime:
        for source, why in bad:
            with pytest.raises(moonpool.LoadFailed, match=why):
                runtime.load("m", source)


# Several at once


def test_two_runtimes_know_nothing_of_each_other(repository: Path) -> None:
    with Runtime(repository, models=["add"]) as one, Runtime(repository / ".." / repository.name) as other:
        assert one.models() == {"add": [1]}
        assert one.instances("add")[0]["pid"] != other.instances("add")[0]["pid"]
        x = one.empty("add", "A", (1, 2))
        x[...] = 5
        # Memory of one runtime is ordinary memory for the other.
        for each in (one, other):
            assert each.infer("add", {"A": x, "B": x})["SUM"].tolist() == [[10, 10]]
        one.close()
        assert other.infer("add", rows(1))["SUM"].tolist() == [[2]]
        with pytest.raises(moonpool.RuntimeClosed):
            one.infer("add", rows(1))
        assert repr(one) == "<moonpool.Runtime, closed>"


# This runs in another process, because libraries that other tests have imported may not survive a fork.
FORKED = """
import asyncio, os, sys
import numpy as np
import moonpool

x = np.ones((1, 2), np.float32)
inputs = {"A": x, "B": x}
with moonpool.Runtime(sys.argv[1], models=["add"]) as runtime:
    if os.fork() == 0:
        for act in (
            lambda: runtime.infer("add", inputs),
            lambda: runtime.submit("add", inputs),
            lambda: runtime.load("add"),
            lambda: asyncio.run(runtime.ainfer("add", inputs)),
        ):
            try:
                act()
            except moonpool.RuntimeClosed as error:
                print("belongs to the process that made it" in str(error))
        runtime.close()
        print(runtime.is_ready("add"), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
    print(runtime.infer("add", inputs)["SUM"].tolist())
"""


def test_a_fork_does_not_have_the_runtime_of_its_parent(repository: Path) -> None:
    program = run(FORKED, repository)
    said = ["True", "True", "True", "True", "False", "[[2.0, 2.0]]"]
    assert (program.returncode, program.stdout.splitlines()) == (0, said), program.stderr


PROGRAM = """
import asyncio, sys
import numpy as np
import moonpool

async def ask():
    # On a busy machine every step may be slow.
    asyncio.get_running_loop().slow_callback_duration = 3600
    return await runtime.ainfer("add", inputs)

with moonpool.Runtime(sys.argv[1], models=["add"]) as runtime:
    x = np.ones((1, 4), np.float32)
    inputs = {"A": x, "B": x}
    assert runtime.infer("add", inputs)["SUM"].sum() == 8
    assert asyncio.run(ask())["SUM"].sum() == 8
    assert runtime.submit("add", inputs).result().outputs["SUM"].sum() == 8
    runtime.unload("add")
    runtime.load("add")
    kept = runtime.infer("add", inputs)
print("done")
"""


def run(program: str, repository: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", program, str(repository)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


def test_a_program_runs_with_warnings_as_errors(repository: Path) -> None:
    program = run(PROGRAM, repository, "-W", "error", "-X", "dev")
    assert (program.returncode, program.stdout, program.stderr) == (0, "done\n", "")


@pytest.mark.promise(
    "GPUs in the runtime",
    "With `MOONPOOL_AS_CPU`, instances of `KIND_GPU` are on the CPU, and the driver is not loaded.",
)
def test_a_model_of_gpus_that_no_machine_has_serves_on_the_cpu(tmp_path: Path) -> None:
    groups = "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 4000, 4001 ] } ]"
    write_model(tmp_path, "add", 1, config=f"{CONFIG} {groups}")
    with Runtime(tmp_path, models=()) as runtime:
        with pytest.raises(moonpool.ConfigError, match="MOONPOOL_AS_CPU=yes"):
            runtime.load("add")
        runtime.load("add", options={"MOONPOOL_AS_CPU": "yes"})

        (group,) = runtime.config("add").instance_groups
        assert (group.kind, group.gpus, len(runtime.instances("add"))) == ("CPU", (), 2)
        assert runtime.config("add").raw["instance_group"][0]["kind"] == "KIND_CPU"
        assert runtime.infer("add", rows(1))
