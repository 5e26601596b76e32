"""Tests of models that load, unload and look at other models, and at themselves."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, is_running
from tests.waiting import wait_until

import moonpool

EVALUATOR = (MODELS / "evaluator.py").read_text()
SLOW = """
import os
import time


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [1]})
        return config

    def initialize(self, args):
        while not os.path.exists(args["model_repository"] + "/go"):
            time.sleep(0.01)

    def execute(self, requests):
        return None
"""
CONFIG = 'json.dumps({"backend": "python", "max_batch_size": 4})'
LOAD = "Failed to load model: Failed to process the request for model 'asker_0', message: "
READY = "Failed to check model readiness: Failed to process the request for model 'asker_0', message: "
POLL = f"TritonModelException: {LOAD}failed to load 'target', failed to poll from model repository"


def write(repository: Path, name: str, text: str, config: str = "") -> None:
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    (repository / name / "1" / "model.py").write_text(text)
    (repository / name / "config.pbtxt").write_text(config or 'backend: "python"')


def at_start(expression: str) -> str:
    return f'parameters {{ key: "AT_START" value {{ string_value: {json.dumps(expression)} }} }}'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return made(tmp_path / "models")


def made(folder: Path) -> Path:
    """Make a repository of a model that asks, and of some that it can ask for."""
    for name in ("asker", "target"):
        write(folder, name, EVALUATOR)
    write(folder, "bad", "raise ValueError('bad file')")
    write(folder, "homeless", "", 'backend: "nobody_s"')
    return folder


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder for temporary files that the models of the test do not share."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture
def runtime(repository: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[moonpool.Runtime]:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with moonpool.Runtime(repository, models=["asker"]) as runtime:
        yield runtime
    assert list(temporary.iterdir()) == []


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[moonpool.Runtime]:
    """Share a runtime between tests that leave it as it was."""
    repository = made(tmp_path_factory.mktemp("unchanged"))
    with moonpool.Runtime(repository, models=["asker"]) as runtime:
        yield runtime


def ask(runtime: moonpool.Runtime, *codes: str, model: str = "asker") -> list[str]:
    inputs = {"CODE": np.array([code.encode() for code in codes], object)}
    results = runtime.infer(model, inputs, timeout_s=60.0)["RESULT"]
    return [result.decode() for result in results]


def pid(runtime: moonpool.Runtime, model: str) -> int:
    found = runtime.instances(model)[0]["pid"]
    assert isinstance(found, int)
    return found


@pytest.mark.promise(
    "Backends",
    "A model can load, unload and look at other models, and itself, in `initialize` and in "
    "`execute`, with Triton's texts.",
)
def test_a_model_loads_looks_at_and_unloads_another(runtime: moonpool.Runtime) -> None:
    assert ask(
        runtime,
        'pb_utils.is_model_ready("target")',
        'pb_utils.load_model("target")',
        'pb_utils.is_model_ready("target")',
        'pb_utils.is_model_ready(model_name="target", model_version="1")',
    ) == ["False", "None", "True", "True"]
    assert ask(runtime, "1 + 1", model="target") == ["2"]
    assert ask(runtime, 'pb_utils.unload_model("target")') == ["None"]
    wait_until(lambda: ask(runtime, 'pb_utils.is_model_ready("target")') == ["False"])
    # As in Triton, none of these is an error.
    assert ask(
        runtime, 'pb_utils.unload_model("target")', 'pb_utils.unload_model("nobody", unload_dependents=True)'
    ) == ["None", "None"]


def test_a_loaded_model_is_loaded_again_only_if_it_was_changed(runtime: moonpool.Runtime, repository: Path) -> None:
    load = 'pb_utils.load_model("target")'
    assert ask(runtime, load) == ["None"]
    before = pid(runtime, "target")
    assert ask(runtime, load) == ["None"]
    assert pid(runtime, "target") == before
    write(repository, "target", EVALUATOR + "\n# changed")
    assert ask(runtime, load) == ["None"]
    assert pid(runtime, "target") != before


def test_a_configuration_replaces_the_one_in_the_repository(runtime: moonpool.Runtime, repository: Path) -> None:
    write(repository, "target", EVALUATOR, 'backend: "python" parameters { key: "a" value { string_value: "b" } }')
    assert ask(runtime, f'pb_utils.load_model("target", {CONFIG})') == ["None"]
    config = runtime.config("target")
    assert (config.max_batch_size, dict(config.parameters)) == (4, {})
    assert ask(runtime, 'pb_utils.load_model("target", "{}")') == ["None"]
    assert runtime.config("target").max_batch_size == 0
    assert ask(runtime, 'pb_utils.load_model("target")') == ["None"]
    assert dict(runtime.config("target").parameters) == {"a": "b"}


@pytest.mark.promise("The model repository of a server", "A load may bring a …")
def test_a_model_is_made_of_files(runtime: moonpool.Runtime, temporary: Path) -> None:
    files = '{"file:1/model.py": open(pb_utils.get_model_dir() + "/model.py", "rb").read()}'
    assert ask(runtime, f'pb_utils.load_model("made", config="{{}}", files={files})') == ["None"]
    (where,) = ask(runtime, "pb_utils.get_model_dir()", model="made")
    assert str(temporary) in where
    assert where.endswith("/made/1'")
    slash = files.replace("file:1", "file:/1")
    assert ask(runtime, f'pb_utils.load_model("made", config="{{}}", files={slash})') == ["None"]
    assert ask(runtime, "pb_utils.get_model_dir()", model="made")[0].endswith("/made/1'")
    big = '{"file:1/model.py": open(pb_utils.get_model_dir() + "/model.py", "rb").read(), "file:1/weights": bytes(3_000_000)}'
    assert ask(runtime, f'pb_utils.load_model("made", "{{}}", {big})') == ["None"]
    assert ask(runtime, 'os.path.getsize(pb_utils.get_model_dir() + "/weights")', model="made") == ["3000000"]


@pytest.mark.promise("Backends", "A model can load, unload …")
@pytest.mark.promise("At the limits", "A value that does not fit …")
@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            'pb_utils.load_model("bad")',
            f"TritonModelException: {LOAD}load failed for model 'bad': version 1 is at UNAVAILABLE "
            "state: Internal: ValueError: bad file\n\nAt:\n",
        ),
        (
            'pb_utils.load_model("homeless")',
            f"TritonModelException: {LOAD}load failed for model 'homeless': Internal: unable to find "
            "backend library for backend 'nobody_s', try specifying runtime on the model "
            "configuration.",
        ),
        (
            'pb_utils.load_model("nobody")',
            f"TritonModelException: {LOAD}failed to load 'nobody', failed to poll from model "
            "repository: no model 'nobody' in the repository",
        ),
        (
            'pb_utils.load_model("")',
            f"TritonModelException: {LOAD}failed to load '', failed to poll from model repository",
        ),
        ('pb_utils.load_model("target", "not json")', f"{POLL}: Invalid config override: "),
        ('pb_utils.load_model("target", "[]")', f"{POLL}: Invalid config override: "),
        (
            'pb_utils.load_model("target", \'{"max_batch_size": -1}\')',
            f"{POLL}: max_batch_size: 'max_batch_size' must be non-negative value for target",
        ),
        (
            'pb_utils.load_model("target", "", {"file:1/model.py": b"x"})',
            f"{POLL}: Load parameter 'config' must be specified for model file override",
        ),
        (
            'pb_utils.load_model("target", "{}", {"file:../1/model.py": b"x"})',
            f"{POLL}: Invalid file parameter 'file:../1/model.py' must stay within model directory.",
        ),
        (
            'pb_utils.load_model("target", "{}", {"1/model.py": b"x"})',
            f"{POLL}: Invalid file parameter '1/model.py' must be 'file:<path>'.",
        ),
        (
            'pb_utils.load_model("target", "", [])',
            "TritonModelException: failed to load model 'target', files should be a dictionary of "
            "file paths and file contents",
        ),
        ('pb_utils.load_model("target", "{}", {"file:1/model.py": "text"})', "TypeError: "),
        ('pb_utils.load_model("target", "{}", {1: b"x"})', "TypeError: "),
        (
            'pb_utils.load_model("target", "x" * (1 << 23))',
            "TritonModelException: a configuration of 8388608 bytes; 4194304 is the most",
        ),
        (
            'pb_utils.load_model("target", "{}", {f"file:{i}": b"" for i in range(70_000)})',
            "TritonModelException: 70000 files for a model; 65536 is the most",
        ),
        ("pb_utils.load_model(None)", "TypeError: "),
        ('pb_utils.load_model("target", None)', "TypeError: "),
        ("pb_utils.unload_model(None)", "TypeError: "),
        ('pb_utils.unload_model("target", None)', "TypeError: "),
        ('pb_utils.is_model_ready("target", 1)', "TypeError: "),
        ('pb_utils.is_model_ready("nobody")', "False"),
        ('pb_utils.is_model_ready("asker", "0")', "False"),
        ('pb_utils.is_model_ready("asker", "2")', "False"),
        ('pb_utils.is_model_ready("asker", " 1x")', "True"),
        (
            'pb_utils.is_model_ready("asker", "x")',
            f"TritonModelException: {READY}failed to get model version from specified version string "
            "'x' (details: stol), version should be an integral value > 0",
        ),
        (
            'pb_utils.is_model_ready("asker", "-1")',
            f"TritonModelException: {READY}failed to get model version from specified version string "
            "'-1', version should be an integral value > 0",
        ),
    ],
)
def test_an_impossible_load_is_refused_in_tritons_words(unchanged: moonpool.Runtime, code: str, text: str) -> None:
    (said,) = ask(unchanged, code)
    assert said.startswith(text)
    assert list(unchanged.models()) == ["asker"]


@pytest.mark.promise(
    "Backends",
    "If a model loads another one with a configuration, that gives no looser sandbox and no "
    "more of the environment than the model has itself.",
)
def test_a_model_gives_no_other_more_than_it_has(unchanged: moonpool.Runtime) -> None:
    level = unchanged.instances("asker")[0]["sandbox"]["level"]
    refused = {"MOONPOOL_SANDBOX": ("off", f"a model in the sandbox '{level}' cannot load one in 'off'")}
    if level == "strict":
        words = "a model in the sandbox 'strict' cannot set this for another"
        refused["MOONPOOL_ENVIRONMENT"] = ("SECRET", words)
    for key, (value, text) in refused.items():
        config = json.dumps({"parameters": {key: {"string_value": value}}})
        (said,) = ask(unchanged, f'pb_utils.load_model("target", {config!r})')
        assert said.endswith(text)


# Circles


def test_models_are_loaded_in_initialize(runtime: moonpool.Runtime, repository: Path) -> None:
    write(repository, "starter", EVALUATOR, at_start('pb_utils.load_model("target")'))
    runtime.load("starter", instances=3)
    assert ask(runtime, "self.said", model="starter") == ["'None'"]
    assert sorted(runtime.models()) == ["asker", "starter", "target"]
    assert len(runtime.instances("target")) == 1


@pytest.mark.promise("Backends", "If models would wait for …")
def test_a_model_that_loads_itself_in_initialize_is_told(runtime: moonpool.Runtime, repository: Path) -> None:
    write(repository, "starter", EVALUATOR, at_start('pb_utils.load_model("starter")'))
    runtime.load("starter")
    (said,) = ask(runtime, "self.said", model="starter")
    assert "model 'starter' is loading or unloading, and that waits for model 'starter'" in said


@pytest.mark.promise(
    "Backends", "If models would wait for each other's loads, they get an error instead, and nothing hangs."
)
def test_models_that_load_each_other_are_told(runtime: moonpool.Runtime, repository: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        write(repository, name, EVALUATOR, at_start(f'pb_utils.load_model("{other}")'))
    runtime.load("a")
    said = [ask(runtime, "self.said", model=name)[0] for name in "abc"]
    assert said[:2] == ["'None'", "'None'"]
    assert "model 'a' is loading or unloading, and that waits for model 'c'" in said[2]


def test_a_model_unloads_itself_in_initialize(runtime: moonpool.Runtime, repository: Path) -> None:
    write(repository, "starter", EVALUATOR, at_start('pb_utils.unload_model("starter")'))
    runtime.load("starter")
    wait_until(lambda: "starter" not in runtime.models())


def test_a_model_unloads_itself_while_it_executes(runtime: moonpool.Runtime) -> None:
    before = pid(runtime, "asker")
    assert ask(runtime, 'pb_utils.unload_model("asker")', "1 + 1") == ["None", "2"]
    wait_until(lambda: not is_running(before))
    with pytest.raises((moonpool.ModelNotFound, moonpool.ModelUnavailable)):
        ask(runtime, "1")


def test_a_model_loads_its_own_successor_while_it_executes(runtime: moonpool.Runtime, repository: Path) -> None:
    before = pid(runtime, "asker")
    write(repository, "asker", EVALUATOR + "\n# changed")
    said = ask(runtime, 'pb_utils.load_model("asker")', 'pb_utils.is_model_ready("asker")')
    assert said == ["None", "True"]
    assert ask(runtime, "1 + 1") == ["2"]
    assert pid(runtime, "asker") != before
    wait_until(lambda: not is_running(before))


def test_threads_of_a_model_that_load_one_model_start_it_once(runtime: moonpool.Runtime) -> None:
    loads = "[threading.Thread(target=pb_utils.load_model, args=('target',)) for _ in range(8)]"
    each = f"[(t.start(), t) for t in {loads}]"
    assert ask(runtime, f"[t.join() for _, t in {each}]") == [str([None] * 8)]
    assert len(runtime.instances("target")) == 1
    assert ask(runtime, "1", model="target") == ["1"]


# Ends


def test_a_model_that_dies_while_it_waits_for_a_load_leaves_the_load_alone(
    runtime: moonpool.Runtime, repository: Path
) -> None:
    write(repository, "slow", SLOW)
    inputs = {"CODE": np.array([b'pb_utils.load_model("slow")'], object)}
    future = runtime.submit("asker", inputs)
    wait_until(lambda: _is_loading(runtime, "slow"))
    os.kill(pid(runtime, "asker"), signal.SIGKILL)
    with pytest.raises(moonpool.StubDied):
        future.result(60.0)
    (repository / "slow" / "go").touch()
    wait_until(lambda: runtime.is_ready("slow"))
    wait_until(lambda: runtime.is_ready("asker"))
    assert ask(runtime, 'pb_utils.is_model_ready("slow")') == ["True"]


def test_a_runtime_closes_while_a_model_waits_for_a_load(repository: Path) -> None:
    write(repository, "slow", SLOW)
    inputs = {"CODE": np.array([b'pb_utils.load_model("slow")'], object)}
    with moonpool.Runtime(repository, models=["asker"]) as runtime:
        future = runtime.submit("asker", inputs)
        wait_until(lambda: _is_loading(runtime, "slow"))
    assert future.done()


def _is_loading(runtime: moonpool.Runtime, name: str) -> bool:
    try:
        runtime.config(name)
    except moonpool.ModelUnavailable:
        return True
    except moonpool.ModelNotFound:
        return False
    return False
