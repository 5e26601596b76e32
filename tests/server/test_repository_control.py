"""The model repository extension: the index, loads and unloads by clients, and repositories that change."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.server.repositories import BAD, CONFIG, ECHO, write
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.errors import LoadFailed, ModelUnavailable
from moonpool.runtime.server.metadata import Metadata
from moonpool.runtime.server.repository_control import RepositoryControl

IN = {"IN": np.ones((1, 4), np.float32)}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("good", "other"):
        write(tmp_path / "models", name)
    return tmp_path / "models"


@pytest.fixture
def runtime(models: Path) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(models, models=()) as runtime:
        yield runtime


@pytest.fixture
def control(runtime: moonpool.Runtime) -> RepositoryControl:
    return RepositoryControl(runtime)


def entry(control: RepositoryControl, name: str) -> list[dict[str, str]]:
    return [each for each in control.index() if each["name"] == name]


def state(control: RepositoryControl, name: str) -> str:
    (found,) = entry(control, name)
    return found.get("state", "")


@pytest.mark.promise(
    "The model repository of a server",
    "The index has every version with its state and, if it is not available, the reason: "
    "it was unloaded, or the error of its load.",
)
def test_the_index_follows_a_model_through_its_life(control: RepositoryControl) -> None:
    assert control.index() == [{"name": "good"}, {"name": "other"}]
    control.load("good")
    assert control.index()[0] == {"name": "good", "version": "1", "state": "READY"}
    assert control.index(ready_only=True) == [control.index()[0]]
    control.unload("good")
    wait_until(lambda: state(control, "good") == "UNAVAILABLE")
    assert control.index()[0] == {"name": "good", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert control.index(ready_only=True) == []


@pytest.mark.promise(
    "The model repository of a server",
    "An unload returns at once. From then on new requests do not find the model, and it finishes those that it has.",
)
def test_an_unload_returns_at_once_and_from_then_on_nobody_finds_the_model(
    control: RepositoryControl, runtime: moonpool.Runtime
) -> None:
    control.load("good")
    control.unload("good")
    with pytest.raises(moonpool.MoonpoolError):
        runtime.infer("good", IN)
    control.load("good")
    assert runtime.infer("good", IN)["OUT"].tolist() == [[1.0] * 4]
    control.unload("nope")


@pytest.mark.promise("The model repository of a server", "The index has every version with …")
def test_why_a_load_failed_is_told_and_stays_in_the_index(control: RepositoryControl, models: Path) -> None:
    write(models, "bad", BAD)
    with pytest.raises(LoadFailed, match="load failed for model 'bad': version 1 is at ") as raised:
        control.load("bad")
    assert raised.value.code == "INVALID_ARG"
    (found,) = entry(control, "bad")
    assert (found["version"], found["state"]) == ("1", "UNAVAILABLE")
    assert found["reason"].startswith("Internal: ValueError: boom")
    control.unload("bad")
    (found,) = entry(control, "bad")
    assert (found["state"], found["reason"]) == ("UNAVAILABLE", "unloaded")


@pytest.mark.parametrize(
    ("name", "config", "code", "text"),
    [
        ("nope", "", "INTERNAL", "failed to load 'nope', failed to poll from model repository"),
        ("good", "no json", "INTERNAL", "Invalid config override"),
        ("good", '{"bogus": 1}', "INTERNAL", "bogus"),
        ("good", '{"name": "x"}', "INTERNAL", "unexpected directory name 'good' for model 'x'"),
        ("empty", "", "INVALID_ARG", "at least one version must be available under the version"),
    ],
)
def test_a_load_that_cannot_be_says_why(
    control: RepositoryControl, runtime: moonpool.Runtime, models: Path, name: str, config: str, code: str, text: str
) -> None:
    (models / "empty").mkdir()
    (models / "empty" / "config.pbtxt").write_text(CONFIG)
    with pytest.raises(LoadFailed, match=text) as raised:
        control.load(name, config or None)
    assert raised.value.code == code
    # A load that never began leaves nothing in the index, and the server ready.
    assert [each["name"] for each in control.index()] == ["empty", "good", "other"]
    assert Metadata(runtime).is_ready()


@pytest.mark.promise(
    "The model repository of a server",
    "A load may bring a configuration and files. The path of a file is relative to the model's "
    "directory, with or without a slash before it, for clients and models alike.",
)
def test_a_load_may_bring_its_configuration_and_its_files(
    control: RepositoryControl, runtime: moonpool.Runtime
) -> None:
    tensor = {"data_type": "TYPE_FP32", "dims": [4]}
    whole = {
        "backend": "python",
        "max_batch_size": 2,
        "input": [{"name": "IN", **tensor}],
        "output": [{"name": "OUT", **tensor}],
    }
    control.load("good", json.dumps(whole))
    assert runtime.config("good").max_batch_size == 2
    control.load("good")
    assert runtime.config("good").max_batch_size == 4
    control.load("fresh", json.dumps(whole), {"file:1/model.py": ECHO.encode()})
    assert runtime.infer("fresh", IN)["OUT"].tolist() == [[1.0] * 4]
    for slashes in ("/", "//"):
        control.load("fresh", json.dumps(whole), {f"file:{slashes}1/model.py": ECHO.encode()})
        assert runtime.infer("fresh", IN)["OUT"].tolist() == [[1.0] * 4]
    twice = {"file:1/model.py": ECHO.encode(), "file:/1/model.py": b""}
    with pytest.raises(LoadFailed, match=r"the file '1/model\.py' is there twice"):
        control.load("fresh", json.dumps(whole), twice)
    for outside in ("file:/", "file:/../x.py", "file:/1/../../x.py"):
        with pytest.raises(LoadFailed, match="must stay within model directory"):
            control.load("fresh", json.dumps(whole), {outside: b""})
    with pytest.raises(LoadFailed, match="'config' must be specified for model file override"):
        control.load("fresh", None, {"file:1/model.py": b""})


@pytest.mark.promise(
    "The model repository of a server", "Clients and models load and unload only in the mode `explicit`."
)
@pytest.mark.parametrize("mode", ["none", "poll"])
def test_clients_and_models_control_nothing_unless_the_mode_is_explicit(runtime: moonpool.Runtime, mode: str) -> None:
    control = RepositoryControl(runtime, mode=mode)
    for act in (control.load, control.unload):
        with pytest.raises(ModelUnavailable, match="explicit model load / unload is not allowed"):
            act("good")


@pytest.mark.promise("The model repository of a server", "A model that is in two repositories is served from neither.")
def test_a_name_in_two_repositories_is_served_from_neither(models: Path, tmp_path: Path) -> None:
    for name in ("good", "third"):
        write(tmp_path / "more", name)
    with moonpool.Runtime([models, tmp_path / "more"], models=()) as runtime:
        control = RepositoryControl(runtime, mode="none")
        assert not control.load_all()
        assert runtime.models() == {"other": [1], "third": [1]}
        assert entry(control, "good") == [
            {"name": "good", "state": "UNAVAILABLE", "reason": "model appears in two or more repositories"}
        ]


@pytest.mark.promise(
    "The model repository of a server",
    "A poll loads what is new or has changed, and unloads models that are gone. If the "
    "new files of a model cannot be loaded, the old ones go on serving.",
)
def test_a_poll_loads_what_is_new_or_changed_and_unloads_what_is_gone(runtime: moonpool.Runtime, models: Path) -> None:
    control = RepositoryControl(runtime, mode="poll")
    control.poll()
    first = runtime.instances("good")[0]["pid"]
    control.poll()
    assert runtime.instances("good")[0]["pid"] == first

    write(models, "good", ECHO + "\n")
    write(models, "third")
    shutil.rmtree(models / "other")
    control.poll()
    assert runtime.instances("good")[0]["pid"] != first
    assert sorted(runtime.models()) == ["good", "third"]
    wait_until(lambda: state(control, "other") == "UNAVAILABLE")


@pytest.mark.promise("The model repository of a server", "The log says once that a model is gone from the repository.")
def test_a_missing_model_is_logged_once(
    models: Path, runtime: moonpool.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moonpool")
    control = RepositoryControl(runtime, mode="poll")
    control.poll()
    shutil.rmtree(models / "good")
    for _ in range(3):
        control.poll()
    assert caplog.text.count("'good' was removed from the repository") == 1
    write(models, "good")
    control.poll()
    assert state(control, "good") == "READY"
    shutil.rmtree(models / "good")
    control.poll()
    assert caplog.text.count("'good' was removed from the repository") == 2


@pytest.mark.promise("The model repository of a server", "A poll that fails is logged, and the next one follows.")
def test_a_poll_that_nobody_foresaw_to_fail_is_logged(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    control = RepositoryControl(runtime, mode="poll")
    monkeypatch.setattr(control, "load_all", lambda **_: 1 // 0)
    control.poll()
    assert "the repositories cannot be polled" in caplog.text
    monkeypatch.undo()
    control.poll()
    assert state(control, "good") == "READY"


@pytest.mark.promise(
    "The model repository of a server", "The index lists directories whose names are not UTF-8, with the bytes escaped."
)
def test_the_index_has_directories_whose_names_are_no_text(models: Path, control: RepositoryControl) -> None:
    (models / os.fsdecode(b"m\xff")).mkdir()
    assert [each["name"] for each in control.index()] == ["good", "m\\udcff", "other"]


@pytest.mark.promise("The model repository of a server", "A poll loads what is new …")
def test_a_poll_keeps_what_serves_where_its_replacement_fails(
    runtime: moonpool.Runtime, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    control = RepositoryControl(runtime, mode="poll")
    control.poll()
    write(models, "good", BAD)
    with caplog.at_level(logging.ERROR, "moonpool.server"):
        control.poll()
        control.poll()
    assert sum("boom" in record.getMessage() for record in caplog.records) == 1
    assert state(control, "good") == "READY"
    assert runtime.infer("good", IN)["OUT"].tolist() == [[1.0] * 4]


def test_a_failed_model_is_tried_again_after_a_change_or_on_demand(
    runtime: moonpool.Runtime, models: Path, tmp_path: Path
) -> None:
    tries = tmp_path / "tries"
    write(models, "bad", f"open({str(tries)!r}, 'a').write('x')\n{BAD}")
    control = RepositoryControl(runtime, mode="poll")

    def tried(*, again: bool = False) -> int:
        before = tries.stat().st_size if tries.exists() else 0
        control.poll(again=again)
        return tries.stat().st_size - before

    assert (tried(), tried(), tried(again=True)) == (1, 0, 1)
    write(models, "bad")
    control.poll()
    assert runtime.is_ready("bad")


@pytest.mark.promise(
    "The model repository of a server",
    "With strict readiness, a server is ready only while every version that should be loaded serves.",
)
def test_strict_readiness_is_that_all_that_was_wanted_serves(runtime: moonpool.Runtime, models: Path) -> None:
    control = RepositoryControl(runtime)
    strict, lax = Metadata(runtime), Metadata(runtime, strict_readiness=False)
    write(models, "bad", BAD)
    assert strict.is_ready()
    assert not control.load_all(["good", "bad"])
    assert (strict.is_ready(), lax.is_ready()) == (False, True)
    write(models, "bad")
    control.load("bad")
    assert strict.is_ready()
    control.unload("bad")
    wait_until(strict.is_ready)
    lax.is_open = False
    assert not lax.is_ready()
