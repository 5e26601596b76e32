"""Errors of contained models that could not load get a sentence with the cure, and other errors get none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moonpool.ipc.policy import Policy
from moonpool.runtime.isolation.hints import closed_files, withheld

pytestmark = pytest.mark.promise(
    "Seeing sandboxes",
    "If a load fails because of the sandbox, the error says which option grants the act, "
    "or which files are closed to the instance's user.",
)


def refused(path: Path) -> str:
    return f"PermissionError: [Errno 13] Permission denied: '{path}'"


def strict(*read: Path, user: int | None = None) -> Policy:
    return Policy(level="strict", read=[str(path) for path in read], user=user)


def test_a_foreign_file_is_granted_by_its_path(tmp_path: Path) -> None:
    text = withheld(refused(tmp_path / "weights"), strict())

    assert "MOONPOOL_SANDBOX_PATHS" in text
    assert "rw:" not in text


def test_its_own_file_that_its_user_cannot_read_wants_another_mode(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.touch(0o600)
    tmp_path.chmod(0o755)

    assert "closed to user 60600" in withheld(refused(file), strict(tmp_path, user=60600))
    file.chmod(0o644)
    assert "chmod" not in withheld(refused(file), strict(tmp_path, user=60600))


def test_its_own_folder_is_not_to_be_written_to(tmp_path: Path) -> None:
    text = withheld(refused(tmp_path / "cache"), strict(tmp_path))

    assert "TMPDIR" in text
    assert "rw:" in text


@pytest.mark.promise(
    "Layers of the sandbox",
    "The error of a model that may not use a file of somebody else in a granted folder says how "
    "to give it to the folder's owner.",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_file_of_somebody_else_in_a_granted_folder_is_given_to_its_owner(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch(0o600)
    (tmp_path / "own").touch(0o600)
    os.chown(tmp_path / "theirs", 60600, 60600)
    policy = Policy(level="strict", user=60601, granted=[(str(tmp_path), True)])

    command = f"chown -R --reference={tmp_path} {tmp_path}"
    assert command in withheld(refused(tmp_path / "theirs"), policy)
    assert "chown" not in withheld(refused(tmp_path / "own"), policy)
    assert "chown" not in withheld(refused(tmp_path / "new"), policy)


def test_a_refused_call_names_what_grants_calls() -> None:
    text = withheld("PermissionError: [Errno 1] Operation not permitted", strict())

    assert "MOONPOOL_SANDBOX_PORTS" in text
    assert "MOONPOOL_SANDBOX_SYSCALLS" in text


@pytest.mark.parametrize("level", ["off", "standard"])
def test_nothing_is_said_where_nothing_was_withheld(level: str) -> None:
    assert withheld(refused(Path("/data")), Policy(level=level)) == ""
    assert withheld("ValueError: no", strict()) == ""


def test_closed_files_are_found_and_closed_folders_as_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for name, mode in (("open", 0o644), ("closed", 0o640)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "folder" / "below").touch(0o600)

    assert list(closed_files(tmp_path)) == [tmp_path / "closed", tmp_path / "folder"]
    tmp_path.chmod(0o700)
    assert list(closed_files(tmp_path)) == [tmp_path]


@pytest.mark.parametrize("path", ["/a\0b", "a\0b", "/" + "a/" * 30_000, "\ud800"])
def test_a_model_may_name_what_can_be_the_path_of_nothing(path: str) -> None:
    text = f"PermissionError: [Errno 13] Permission denied: '{path}'"

    assert withheld(text, strict()) == "" or "MOONPOOL_SANDBOX_PATHS" in withheld(text, strict())
