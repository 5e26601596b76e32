"""Loading a loaded model replaces it without a lost request, or leaves it alone; and files from a caller."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.repository.loading import HostingRules, Wanted, prepare
from moonpool.runtime.repository.repository import ModelRepositories

SAYS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "SAID", "data_type": "TYPE_INT32", "dims": [1]})
        return config

    def execute(self, requests):
        said = np.array([NUMBER], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)]) for _ in requests]
"""
X = {"X": np.ones(1, np.float32)}


def says(number: int) -> str:
    return SAYS.replace("NUMBER", str(number))


def write(repository: Path, number: int, version: int = 1) -> None:
    folder = repository / "m" / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.py"
    file.write_text(says(number))
    # Two writes in a moment may bear the same time.
    os.utime(file, ns=(0, number * 1_000_000_000))


def said(runtime: moonpool.Runtime, version: int | None = None) -> int:
    return int(runtime.infer("m", X, version=version, timeout_s=60.0)["SAID"][0])


def pid(runtime: moonpool.Runtime) -> int:
    found = runtime.instances("m")[0]["pid"]
    assert isinstance(found, int)
    return found


def ended(number: int) -> bool:
    return not Path(f"/proc/{number}").exists()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path / "models", 1)
    return tmp_path / "models"


@pytest.fixture
def runtime(repository: Path) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(repository) as runtime:
        yield runtime


@pytest.mark.promise("Backends", "A loaded model is replaced without …")
def test_an_unchanged_model_is_left_alone(runtime: moonpool.Runtime, repository: Path) -> None:
    before = pid(runtime)
    (repository / "m" / "1" / "__pycache__").mkdir(exist_ok=True)
    (repository / "m" / "1" / "__pycache__" / "new.pyc").write_bytes(b"")
    runtime.load("m")
    runtime.load("m", config={})
    assert pid(runtime) == before


def test_a_changed_file_or_configuration_replaces_the_model(runtime: moonpool.Runtime, repository: Path) -> None:
    before = pid(runtime)
    write(repository, 2)
    assert said(runtime) == 1
    runtime.load("m")
    assert said(runtime) == 2
    wait_until(lambda: ended(before))

    before = pid(runtime)
    runtime.load("m", config={"parameters": {"a": "b"}}, instances=2)
    assert len(runtime.instances("m")) == 2
    wait_until(lambda: ended(before))
    # Without the override, the model is as the repository has it.
    runtime.load("m")
    assert len(runtime.instances("m")) == 1


def test_versions_come_and_go_with_their_directories(runtime: moonpool.Runtime, repository: Path) -> None:
    write(repository, 3, version=3)
    runtime.load("m")
    assert runtime.models() == {"m": [3]}
    assert said(runtime) == 3
    with pytest.raises(moonpool.ModelNotFound):
        said(runtime, version=1)


@pytest.mark.promise("Backends", "A loaded model is replaced without …")
def test_a_failed_load_leaves_the_model_that_serves(runtime: moonpool.Runtime, repository: Path) -> None:
    before = pid(runtime)
    (repository / "m" / "1" / "model.py").write_text("raise ValueError('no')")
    with pytest.raises(moonpool.LoadFailed, match="ValueError: no"):
        runtime.load("m")
    assert (said(runtime), pid(runtime)) == (1, before)
    with pytest.raises(moonpool.ConfigError):
        runtime.load("m", config={"max_batch_size": -1})
    assert (said(runtime), pid(runtime)) == (1, before)


@pytest.mark.promise(
    "Backends",
    "A loaded model is replaced without a request being lost, and left alone where nothing was "
    "changed; a failed load changes nothing.",
)
def test_no_request_is_lost_while_a_model_is_replaced_again_and_again(
    runtime: moonpool.Runtime, repository: Path
) -> None:
    stop = threading.Event()
    answers: list[int] = []
    errors: list[BaseException] = []

    def ask() -> None:
        while not stop.is_set():
            try:
                answers.append(said(runtime))
            except moonpool.MoonpoolError as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(errors) or answers)
    for number in (2, 3, 4):
        write(repository, number)
        runtime.load("m")
        wait_until(lambda: bool(errors) or answers[-1:] == [number])  # noqa: B023 - waited for here
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert set(answers) == {1, 2, 3, 4}


def test_closing_ends_also_what_was_just_replaced(repository: Path) -> None:
    with moonpool.Runtime(repository) as runtime:
        before = pid(runtime)
        write(repository, 2)
        runtime.load("m")
    assert ended(before)


# Files from a caller


@pytest.fixture
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a directory of the test for temporary files, so that leftovers show."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def made(number: int) -> dict[str, bytes]:
    return {"1/model.py": says(number).encode()}


@pytest.mark.promise(
    "Backends", "Files from a caller are written into a private directory and nowhere else, which goes with the model."
)
def test_a_model_can_be_made_of_files_in_memory(own_temporary: Path) -> None:
    with moonpool.Runtime() as runtime:
        runtime.load("m", files=made(5))
        (folder,) = own_temporary.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        before = pid(runtime)
        runtime.load("m", files=made(5))
        assert (said(runtime), pid(runtime)) == (5, before)
        assert list(own_temporary.iterdir()) == [folder]
        runtime.load("m", files={**made(6), "config.pbtxt": b'name: "m" max_batch_size: 4'})
        batched = {"X": np.ones((1, 1), np.float32)}
        assert runtime.infer("m", batched, timeout_s=60.0)["SAID"].tolist() == [6]
        wait_until(lambda: not folder.exists())
        runtime.unload("m")
        assert list(own_temporary.iterdir()) == []


@pytest.mark.promise("Backends", "Files from a caller are written …")
@pytest.mark.parametrize(
    ("files", "kind", "text"),
    [
        ({"../1/model.py": b""}, moonpool.RepositoryError, "must stay within model directory"),
        ({"1/../../x.py": b""}, moonpool.RepositoryError, "must stay within model directory"),
        ({"/etc/model.py": b""}, moonpool.RepositoryError, "must stay within model directory"),
        ({"": b""}, moonpool.RepositoryError, "must stay within model directory"),
        ({"1/a\0b": b""}, moonpool.RepositoryError, "must stay within model directory"),
        ({"1": b"", "1/model.py": b""}, moonpool.RepositoryError, "cannot write the model's files"),
        ({"1/" + "n" * 300: b""}, moonpool.RepositoryError, "cannot write the model's files"),
        ({"1/other.py": b""}, moonpool.RepositoryError, "Python model file not found"),
        ({}, moonpool.ConfigError, "neither this file nor a version directory"),
        ({"1/model.py": b"raise ValueError('no')"}, moonpool.LoadFailed, "ValueError: no"),
    ],
)
def test_files_that_make_no_model_are_refused_and_leave_nothing(
    own_temporary: Path, files: Mapping[str, bytes], kind: type[Exception], text: str
) -> None:
    outside = sorted(own_temporary.parent.rglob("*"))
    with moonpool.Runtime() as runtime:
        with pytest.raises(kind, match=text):
            runtime.load("m", files=files)
        assert runtime.models() == {}
        assert sorted(own_temporary.parent.rglob("*")) == outside


@pytest.mark.parametrize(
    ("asker", "parameters", "is_allowed"),
    [
        ({}, {}, True),
        ({}, {"MOONPOOL_SANDBOX": "strict"}, True),
        ({}, {"MOONPOOL_SANDBOX": "off"}, False),
        ({"sandbox": "off"}, {"MOONPOOL_SANDBOX": "off", "MOONPOOL_ENVIRONMENT": "A"}, True),
        ({"sandbox": "strict"}, {}, False),
        ({"sandbox": "strict"}, {"MOONPOOL_SANDBOX": "strict"}, True),
        ({"sandbox": "strict"}, {"MOONPOOL_SANDBOX": "strict", "EXECUTION_ENV_PATH": "/an/environment"}, False),
        ({}, {"EXECUTION_ENV_PATH": "/an/environment"}, True),
        ({"environment": ("A", "B")}, {"MOONPOOL_ENVIRONMENT": "B"}, True),
        ({"environment": ("A",)}, {"MOONPOOL_ENVIRONMENT": "A,B"}, True),
        (
            {"sandbox": "strict", "environment": ("A",)},
            {"MOONPOOL_SANDBOX": "strict", "MOONPOOL_ENVIRONMENT": "A,B"},
            False,
        ),
    ],
)
def test_a_configuration_of_a_model_is_no_looser_than_its_own(
    repository: Path, asker: dict[str, Any], parameters: dict[str, str], is_allowed: bool
) -> None:
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    wanted = Wanted("m", config=config, is_whole=True, asker=ModelOptions(**asker))
    refused = contextlib.nullcontext() if is_allowed else pytest.raises(moonpool.ConfigError)
    with refused:
        prepare(wanted, ModelRepositories([repository]), lambda _: None)


def test_a_configuration_of_a_model_that_names_no_level_has_the_operator_s(repository: Path) -> None:
    wanted = Wanted("m", config={}, is_whole=True, asker=ModelOptions(sandbox="strict"))
    prepared = prepare(wanted, ModelRepositories([repository]), lambda _: None, HostingRules("strict"))
    assert [each.options.sandbox for each in prepared.models] == ["strict"]


def test_files_and_a_source_exclude_each_other(repository: Path) -> None:
    with moonpool.Runtime() as runtime, pytest.raises(moonpool.RepositoryError, match="not both"):
        runtime.load("m", repository / "m", files=made(1))


def test_files_go_before_the_repository_s(runtime: moonpool.Runtime, own_temporary: Path) -> None:
    config: Mapping[str, Any] = {"parameters": {"a": {"string_value": "b"}}}
    runtime.load("m", files=made(7), config=config)
    assert said(runtime) == 7
    assert runtime.config("m").parameters == {"a": "b"}
    runtime.load("m")
    assert said(runtime) == 1
    wait_until(lambda: list(own_temporary.iterdir()) == [])
