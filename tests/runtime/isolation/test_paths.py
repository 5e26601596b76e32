"""The files that a contained model gets."""

from __future__ import annotations

import sys
from pathlib import Path

import msgpack
import pytest

import moonpool
from moonpool.runtime.isolation.paths import check_granted, needed_paths, outermost
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.repository.environment import Environment, resolve


def needs(source: ModelSource, environment: Environment, **variables: str) -> list[str]:
    return needed_paths(source, environment, variables, "")


def covers(paths: list[str], path: str | Path) -> bool:
    place = Path(path).resolve()
    return any(place.is_relative_to(each) for each in paths)


def test_folders_inside_others_are_left_out(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "ab").mkdir()
    (tmp_path / "link").symlink_to(inner)

    paths = [inner, tmp_path / "a", tmp_path / "ab", tmp_path / "link", tmp_path / "none"]
    assert outermost(map(str, paths)) == [str(tmp_path / "a"), str(tmp_path / "ab")]


def test_a_model_has_its_directory_and_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "mine" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").touch()
    (tmp_path / "models" / "other").mkdir()
    model = ModelSource("triton", folder / "model.py", None, folder.parent, folder, is_directory=True)

    paths = needs(model, Environment(Path(sys.executable), {}))

    assert covers(paths, folder / "model.py")
    assert not covers(paths, tmp_path / "models" / "other")
    assert not covers(paths, tmp_path)
    assert not covers(paths, Path.home() / ".ssh")
    assert not covers(paths, "/etc/passwd")


@pytest.mark.promise(
    "Layers of the sandbox",
    "A model of a Python-based backend also reads the backend's folder, and not its neighbours.",
)
def test_a_model_of_a_python_based_backend_has_the_backend_s_folder(tmp_path: Path) -> None:
    backend, folder = tmp_path / "backends" / "speaker", tmp_path / "models" / "mine" / "1"
    for each in (backend, folder):
        each.mkdir(parents=True)
    (backend / "model.py").touch()
    model = ModelSource("triton", backend / "model.py", None, folder.parent, folder, is_directory=True)

    paths = needs(model, Environment(Path(sys.executable), {}))

    assert covers(paths, backend / "helper.py")
    assert covers(paths, folder)
    assert not covers(paths, backend.parent)


def test_a_lone_file_has_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    model = ModelSource("triton", tmp_path / "model.py", None, tmp_path, tmp_path)

    paths = needs(model, Environment(Path(sys.executable), {}))

    assert covers(paths, tmp_path / "model.py")
    assert not covers(paths, tmp_path / "neighbour.py")


def test_the_interpreter_finds_its_own(tmp_path: Path) -> None:
    model = ModelSource("triton", tmp_path / "model.py", None, tmp_path, tmp_path)

    paths = needs(model, Environment(Path(sys.executable), {}), PYTHONPATH=str(tmp_path / "more"))
    assert covers(paths, msgpack.__file__)
    assert covers(paths, sys.executable)
    assert not covers(paths, tmp_path / "more")

    (tmp_path / "more").mkdir()
    paths = needs(model, Environment(Path(sys.executable), {}), PYTHONPATH=str(tmp_path / "more"))
    assert covers(paths, tmp_path / "more")


@pytest.mark.promise("Layers of the sandbox", "`/` as a whole cannot be granted for writing.")
def test_not_everything_is_granted_to_be_written() -> None:
    check_granted([("/", False)])
    with pytest.raises(moonpool.LoadFailed, match="name the folders that the model writes to"):
        check_granted([("/", True)])


@pytest.mark.promise("Layers of the sandbox", "A granted path is no link …")
@pytest.mark.parametrize("below", ["", "inner"])
def test_a_granted_path_is_no_link_and_lies_behind_none(tmp_path: Path, below: str) -> None:
    (tmp_path / "place" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "place")

    check_granted([(str(tmp_path / "place" / below), True)])
    with pytest.raises(moonpool.LoadFailed, match=f"name the place itself, {tmp_path}/place"):
        check_granted([(str(tmp_path / "link" / below), False)])


def test_an_environment_cannot_name_the_place_of_its_base(tmp_path: Path) -> None:
    secret, root = tmp_path / "secret", tmp_path / "environment"
    (secret / "bin").mkdir(parents=True)
    (root / "bin").mkdir(parents=True)
    (root / "pyvenv.cfg").write_text(f"home = {secret}/bin\n")
    (root / "bin" / "python").symlink_to(secret / "bin" / "python")
    model = ModelSource("triton", tmp_path / "model.py", None, tmp_path, tmp_path)

    paths = needs(model, Environment(root / "bin" / "python", {}, root))

    assert covers(paths, root / "pyvenv.cfg")
    assert not covers(paths, secret)


@pytest.mark.promise(
    "The sandbox: grants",
    "An environment or a granted path in the model's own directory is no way out of it: a link "
    "there that leads elsewhere is refused at the load, and when an instance restarts. Links "
    "inside an environment open nothing outside of it.",
)
def test_links_in_an_environment_lead_out_of_it_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may bring it, and its `lib` is where the dynamic loader looks first."""
    folder, environment, elsewhere = tmp_path / "m" / "1", tmp_path / "m" / "env", tmp_path / "home"
    for each in (folder, environment / "bin", elsewhere):
        each.mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    (environment / "lib").symlink_to(elsewhere)
    model = ModelSource("triton", folder / "model.py", None, folder.parent, folder, is_directory=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt")
    found = resolve("$$TRITON_MODEL_DIRECTORY/env", folder.parent)

    assert not covers(needs(model, found, **found.variables), elsewhere)
    assert covers(needs(model, found, **found.variables), environment / "bin")
