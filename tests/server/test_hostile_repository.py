"""Repositories with things that are no models. Each breaks only itself, and is logged once."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.server.repositories import CONFIG, ECHO, write
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.process import files as repository_files
from moonpool.runtime.server.repository_control import RepositoryControl

IN = {"IN": np.ones((1, 4), np.float32)}


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Path]:
    write(tmp_path / "models", "good")
    yield tmp_path / "models"
    # Python's `shutil.rmtree` fails on a directory that is too deep.
    subprocess.run(["rm", "-rf", tmp_path / "models"], check=True)


@pytest.fixture
def runtime(models: Path) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(models, models=()) as runtime:
        yield runtime


def fifo_for_a_configuration(bad: Path) -> None:
    write(bad.parent, bad.name)
    (bad / "config.pbtxt").unlink()
    os.mkfifo(bad / "config.pbtxt")


def link_to_a_device(bad: Path) -> None:
    write(bad.parent, bad.name)
    (bad / "config.pbtxt").unlink()
    (bad / "config.pbtxt").symlink_to("/dev/zero")


def socket_for_a_configuration(bad: Path) -> None:
    write(bad.parent, bad.name)
    (bad / "config.pbtxt").unlink()
    folder = os.open(bad, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as unused:
        unused.bind(f"/proc/self/fd/{folder}/config.pbtxt")
    os.close(folder)


def fifo_for_a_model(bad: Path) -> None:
    write(bad.parent, bad.name).unlink()
    os.mkfifo(bad / "1" / "model.py")


def link_to_the_root(bad: Path) -> None:
    bad.symlink_to("/")


def link_to_the_repository(bad: Path) -> None:
    bad.symlink_to(".")


def version_that_is_the_repository(bad: Path) -> None:
    write(bad.parent, bad.name)
    (bad / "2").symlink_to("..")
    (bad.parent / "model.py").write_text(ECHO)


def version_that_is_the_model(bad: Path) -> None:
    write(bad.parent, bad.name)
    (bad / "2").symlink_to(".")
    (bad / "model.py").write_text(ECHO)


def configuration_from_outside(bad: Path) -> None:
    write(bad.parent, bad.name)
    (bad.parent.parent / "config.pbtxt").write_text(CONFIG)
    (bad / "config.pbtxt").unlink()
    (bad / "config.pbtxt").symlink_to("../../config.pbtxt")


def folders_too_deep(bad: Path) -> None:
    write(bad.parent, bad.name)
    deep = os.open(bad / "1", os.O_PATH)
    for _ in range(1200):
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_PATH, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)


def huge_model(bad: Path) -> None:
    with write(bad.parent, bad.name).open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.promise(
    "The model repository of a server",
    "Pipes, devices, links in a circle, folders without end and files of any size in a "
    "repository break only the model that they belong to, and are logged once.",
)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (fifo_for_a_configuration, "it is a named pipe, not a regular file"),
        (link_to_a_device, "it is a device, not a regular file"),
        (socket_for_a_configuration, "it is a socket, not a regular file"),
        (fifo_for_a_model, "Python model file not found in"),
        (link_to_the_root, "links to /, a folder that it lies in"),
        (link_to_the_repository, "a folder that it lies in"),
        (version_that_is_the_repository, "a folder that it lies in"),
        (version_that_is_the_model, "a folder that it lies in"),
        (configuration_from_outside, "which is outside of"),
        (folders_too_deep, "has folders that lie more than 64 deep"),
        (huge_model, "it is larger than 64 MiB"),
    ],
)
def test_a_broken_folder_harms_itself_alone_and_is_logged_once(
    runtime: moonpool.Runtime, models: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None], why: str
) -> None:
    control = RepositoryControl(runtime, mode="poll")
    control.poll()
    first = runtime.instances("good")[0]["pid"]
    make(models / "bad")
    write(models, "late")
    with caplog.at_level(logging.ERROR, "moonpool.server"):
        control.poll()
        write(models, "good", ECHO + "\n")
        control.poll()
        control.poll()
    assert sorted(runtime.models()) == ["good", "late"]
    assert runtime.instances("good")[0]["pid"] != first
    assert runtime.infer("late", IN)["OUT"].tolist() == [[1.0] * 4]
    (record,) = caplog.records
    assert why in record.getMessage()


@pytest.mark.promise("The model repository of a server", "Pipes, devices, links in a circle, …")
def test_a_link_to_itself_hides_no_other_model(
    runtime: moonpool.Runtime, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (models / "bad").symlink_to("bad")
    control = RepositoryControl(runtime, mode="poll")
    with caplog.at_level(logging.ERROR, "moonpool.server"):
        control.poll()
    assert runtime.models() == {"good": [1]}
    assert not caplog.records


@pytest.mark.promise("The model repository of a server", "Links to models and versions are …")
def test_links_in_a_model_are_not_followed_when_it_is_looked_for_changes(
    runtime: moonpool.Runtime, models: Path
) -> None:
    for name in ("here", "there"):
        (models / "good" / "1" / name).symlink_to(".")
    (models / "good" / "1" / "root").symlink_to("/")
    control = RepositoryControl(runtime, mode="poll")
    control.poll()
    first = runtime.instances("good")[0]["pid"]
    control.poll()
    assert runtime.instances("good")[0]["pid"] == first

    (models / "good" / "1" / "root").unlink()
    (models / "good" / "1" / "root").symlink_to("/tmp")
    control.poll()
    assert runtime.instances("good")[0]["pid"] != first


@pytest.mark.promise(
    "The model repository of a server",
    "Links to models and versions are followed, and changes behind them are seen; other links "
    "are not followed when a poll looks for changes.",
)
def test_links_that_operators_set_are_followed_and_changes_behind_them_seen(models: Path, tmp_path: Path) -> None:
    write(tmp_path / "store", "linked")
    write(tmp_path / "store", "versions", version=7)
    (models / "linked").symlink_to(tmp_path / "store" / "linked")
    (models / "mounted" / "..2026").mkdir(parents=True)
    (models / "mounted" / "..2026" / "config.pbtxt").write_text(CONFIG)
    (models / "mounted" / "..data").symlink_to("..2026")
    (models / "mounted" / "config.pbtxt").symlink_to("..data/config.pbtxt")
    (models / "mounted" / "1").symlink_to(tmp_path / "store" / "versions" / "7")
    with moonpool.Runtime(models, models=()) as runtime:
        control = RepositoryControl(runtime, mode="poll")
        control.poll()
        assert runtime.models() == {"good": [1], "linked": [1], "mounted": [1]}
        first = {name: runtime.instances(name)[0]["pid"] for name in ("linked", "mounted")}
        write(tmp_path / "store", "linked", ECHO + "\n")
        write(tmp_path / "store", "versions", ECHO + "\n", version=7)
        control.poll()
        for name, pid in first.items():
            assert runtime.instances(name)[0]["pid"] != pid


@pytest.mark.promise(
    "The model repository of a server",
    "If a repository cannot be read, its models stay as they are, and the other repositories are polled.",
)
def test_a_repository_that_cannot_be_read_keeps_its_models_and_no_others(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "more", "third")
    with moonpool.Runtime([models, tmp_path / "more"], models=()) as runtime:
        control = RepositoryControl(runtime, mode="poll")
        control.poll()
        monkeypatch.setattr(repository_files, "MOST_ENTRIES", 20)
        for number in range(30):
            (tmp_path / "more" / f"m{number}").mkdir()
        write(models, "late")
        with caplog.at_level(logging.ERROR, "moonpool.server"):
            control.poll()
            control.poll()
        assert sorted(runtime.models()) == ["good", "late", "third"]
        (record,) = caplog.records
        assert "has more than 20 files and folders" in record.getMessage()


@pytest.mark.promise("The model repository of a server", "Pipes, devices, links in a circle, …")
def test_a_model_with_too_many_files_is_refused(
    runtime: moonpool.Runtime, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository_files, "MOST_ENTRIES", 20)
    write(models, "bad")
    for number in range(30):
        (models / "bad" / "1" / f"f{number}").touch()
    with pytest.raises(LoadFailed, match="has more than 20 files and folders"):
        RepositoryControl(runtime).load("bad")


@pytest.mark.promise(
    "The model repository of a server", "The files of a load are bounded in number, depth and length of their paths."
)
@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"file:" + "d/" * 2000 + "f": b""}, "64 folders at most"),
        ({"file:1/" + "x" * 2000: b""}, "1024 bytes"),
        ({"file:1/\ud800": b""}, "cannot write the model's files"),
        ({"file:1": b"", "file:1/model.py": b""}, "cannot write the model's files"),
        ({f"file:{number}": b"" for number in range(10_001)}, "10000 files at most"),
    ],
)
def test_files_of_a_load_that_cannot_be_are_refused(
    runtime: moonpool.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], why: str
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(LoadFailed, match=why):
        RepositoryControl(runtime).load("m", json.dumps({"backend": "python"}), files)
    assert os.listdir(tmp_path / "tmp") == []


NEVER_LOADS = """
import threading


class TritonPythonModel:
    def initialize(self, args):
        threading.Event().wait()
"""


@pytest.mark.promise(
    "The model repository of a server", "A model that never ends loading does not stop polls for the others."
)
def test_a_model_that_never_ends_loading_keeps_no_poll_from_the_others(runtime: moonpool.Runtime, models: Path) -> None:
    timeout = 'parameters { key: "MOONPOOL_LOAD_TIMEOUT_S" value { string_value: "none" } }'
    for number in range(3):
        write(models, f"bad{number}", NEVER_LOADS, f"{CONFIG}\n{timeout}")
    control = RepositoryControl(runtime, mode="poll", load_threads=2, patience_s=0.2)
    try:
        control.poll()
        write(models, "late")

        def is_loaded() -> bool:
            control.poll()
            return sorted(runtime.models()) == ["good", "late"]

        wait_until(is_loaded)
        assert runtime.infer("late", IN)["OUT"].tolist() == [[1.0] * 4]
    finally:

        def is_over() -> bool:
            control.give_up()
            return not any(each.name.startswith("moonpool-poll") for each in threading.enumerate())

        wait_until(is_over)
