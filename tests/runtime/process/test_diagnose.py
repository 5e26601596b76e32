"""Reasons why an interpreter could not be started."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.process.diagnose import exec_failure, start_failure

ABSENT = OSError(errno.ENOENT, "No such file or directory")


def test_an_interpreter_that_is_gone_is_to_be_made_again(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(tmp_path / "gone")

    assert start_failure(str(python), ABSENT).endswith(
        f"it needs {tmp_path}/gone or a loader, which is not there; make the environment again on this machine"
    )


def test_an_interpreter_that_only_the_instance_does_not_see_is_to_be_put_elsewhere(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to("/bin/sh")

    why = exec_failure(str(python), str(errno.ENOENT))

    assert "the instance does not see " in why
    assert why.endswith("with an interpreter that all users can read, such as one below /usr or /opt")


def test_an_interpreter_that_never_was_is_to_be_named_again(tmp_path: Path) -> None:
    assert start_failure(str(tmp_path / "python"), ABSENT).endswith("check EXECUTION_ENV_PATH")


def test_an_interpreter_for_which_there_is_no_thread_is_refused_for_that(tmp_path: Path) -> None:
    error = OutOfThreads("the runtime has no thread for moonpool-spawner")

    assert start_failure(str(tmp_path), error).endswith(f"cannot be started: {error}")


def test_an_interpreter_for_which_there_is_no_descriptor_names_the_limit() -> None:
    error = OSError(errno.EMFILE, "Too many open files")

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert start_failure("python", error).endswith(
        f"Too many open files; raise the limit of open files (ulimit -n), which is {most}"
    )
