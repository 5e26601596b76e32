"""Builds environments from lists of packages, with uv where it is there, else with pip.

The tool runs while a model is loaded, and never for a request. It takes its settings from the variables and files that
it has anyway (`UV_INDEX_URL`, `PIP_INDEX_URL`, `UV_OFFLINE`, `pip.conf`), and from the list names, versions and hashes.
Only a lock says itself where its packages are. To install a wheel runs none of its code; to build one does. So for
models that are contained, only wheels are taken. The new interpreter is not started afterwards: a wheel may have a
`.pth`, whose lines run at each start.

An environment is built in a folder that gets another name when it is complete. So paths in its scripts are changed at
the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import IO

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.extras import how_to_install
from moonpool.runtime.process.terminal import harmless
from moonpool.runtime.repository.package_list import LOCK, PROJECT, PackageList, bare_project, fits

# Commands show these steps, too, as they may take minutes.
LOG_OF_BUILDS = "moonpool.environments"
_log = RuntimeLog(LOG_OF_BUILDS)
# In an environment: what it was built from.
NOTE = "moonpool-environment.json"
# Large packages come over slow lines. A tool that hangs must not hold a load for ever.
_BUILD_S = 3600.0
# The interval in which a load that waits for a tool looks whether it is wanted still.
_LOOK_S = 0.1
_TOLD_BYTES = 4000
_SCRIPT_BYTES = 1 << 20
_HERE = ".".join(map(str, sys.version_info[:3]))


class Builder:
    """Makes the environment of a list in an empty folder. For one thread."""

    def __init__(
        self, wanted: PackageList, folder: Path, stop: Event, only_wheels: bool, shows_progress: bool = False
    ) -> None:
        """End the tool once `stop` is set. With `only_wheels`, nothing is compiled. With `shows_progress`, the tools
        write to this program's stderr.
        """
        self._wanted = wanted
        self._folder = folder
        self._stop = stop
        self._only_wheels = only_wheels
        self._shows_progress = shows_progress

    def build(self, final: Path) -> None:
        """Make the environment, whose folder will be renamed to `final`. Blocks.

        Raises `BadEnvironment` with the last words of the tool, and OSError.
        """
        begin_s = time.monotonic()
        uv = _uv()
        tool = "uv" if uv else "pip"
        _log.info("builds the environment of %s with %s, which may take minutes", self._wanted.path, tool)
        if uv:
            self._with_uv(uv)
            self._compile()
        else:
            self._with_pip()
        if not list(self._folder.glob("lib/python*/site-packages/numpy")):
            raise BadEnvironment(f"{self._wanted.path} has no numpy, which every model needs: add it")
        _rename_in_scripts(self._folder, str(final))
        note = {"list": str(self._wanted.path), "tool": tool}
        (self._folder / NOTE).write_text(json.dumps(note))
        took_s = time.monotonic() - begin_s
        _log.info("built the environment of %s in %.1f s", self._wanted.path, took_s)

    def _with_uv(self, uv: str) -> None:
        wanted = self._wanted
        # This Python, if it may be: the one that the operator has chosen.
        python = sys.executable if _fits_here(wanted) else wanted.python
        self._run([uv, "venv", "--no-project", "--allow-existing", "--python", python, str(self._folder)])
        # A copy, as a model may write into its environment, and a link would lead into what uv keeps for all.
        how = ["--link-mode", "copy"]
        if wanted.lock is None:
            interpreter = str(self._folder / "bin" / "python")
            self._install([uv, "pip", "install", "--python", interpreter, *how])
        else:
            self._sync([uv, "sync", "--frozen", "--no-install-project", "--no-dev", *how], *wanted.lock)

    def _sync(self, command: list[str], lock: str, project: str) -> None:
        """Install what a lock says. It lies in a folder of its own, as it was read, whatever becomes of the file."""
        if self._only_wheels:
            command.append("--no-build")
            # In [tool.uv] it could name folders to write into, and interpreters to download and start.
            project = bare_project(project)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, LOCK).write_text(lock)
            Path(folder, PROJECT).write_text(project)
            self._run([*command, "--project", folder])

    def _compile(self) -> None:
        """Compile the modules by this interpreter, which pip does while it installs. A contained model could not keep
        them.
        """
        if _fits_here(self._wanted):
            libraries = str(self._folder / "lib")
            compiles = [sys.executable, "-I", "-m", "compileall", "-q", "-j", "0", libraries]
            # Some packages have files for other versions of Python among theirs.
            with contextlib.suppress(BadEnvironment):
                self._run(compiles)

    def _with_pip(self) -> None:
        path, needs = self._wanted.path, f"needs uv: {how_to_install('environments')}"
        if self._wanted.lock is not None:
            raise BadEnvironment(f"{path} {needs}")
        if not _fits_here(self._wanted):
            what = f"{path} is for Python {self._wanted.python}, and this is {_HERE}"
            raise BadEnvironment(f"{what}; another Python {needs}")
        self._run([sys.executable, "-I", "-m", "venv", "--without-pip", str(self._folder)])
        python = str(self._folder / "bin" / "python")
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-input"]
        self._install(install)

    def _install(self, command: list[str]) -> None:
        if self._wanted.has_hashes:
            command.append("--require-hashes")
        if self._only_wheels:
            command += ["--only-binary", ":all:"]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(self._wanted.requirements) + "\n")
            file.flush()
            self._run([*command, "--requirement", file.name])

    def _run(self, command: Sequence[str]) -> None:
        """Run a tool. Raises `BadEnvironment` with its last words."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
            code = _ended(
                command,
                _variables(os.environ, self._folder),
                output,
                None if self._shows_progress else complaints,
                self._stop,
            )
            if code == 0:
                return
            said = "".join(_last(file) for file in (output, complaints))
        words = harmless(" ".join(said.split())) or "it said nothing"
        what = f"no environment can be built of {self._wanted.path}: {command[0]} ended with {code}"
        raise BadEnvironment(f"{what}: {words}")


def _uv() -> str | None:
    """Return the program uv: of this interpreter's environment, or in the path."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("uv", path=beside) or shutil.which("uv")


def _fits_here(wanted: PackageList) -> bool:
    return fits(sys.version_info[:3], wanted.python)


def _ended(
    command: Sequence[str], variables: Mapping[str, str], output: IO[bytes], complaints: IO[bytes] | None, stop: Event
) -> int | str:
    """Run a tool to its end, and return its exit code, or words for the time that was over or the load that was given
    up.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=complaints,
        env=variables,
        cwd="/",
        start_new_session=True,
    )
    end_s = time.monotonic() + _BUILD_S
    try:
        while not stop.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK_S)
            if time.monotonic() >= end_s:
                return f"no result in {_BUILD_S:g} s"
        return "no result, as the load was given up"
    finally:
        # What the tool has started goes with it, whether it ended, took too long, or was interrupted here.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _variables(given: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables of a tool: those of this process, and the folder in place of the environment that they
    name.
    """
    without = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH")
    variables = {name: value for name, value in given.items() if name not in without}
    more = {"NO_COLOR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**variables, **more, "UV_PROJECT_ENVIRONMENT": str(folder)}


def _last(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TOLD_BYTES))
    return file.read().decode(errors="replace")


def _rename_in_scripts(folder: Path, final: str) -> None:
    """Let the scripts of an environment name the interpreter by the path that it will have."""
    before, after = str(folder).encode(), final.encode()
    for script in (folder / "bin").iterdir():
        if script.is_symlink() or not script.is_file() or script.stat().st_size > _SCRIPT_BYTES:
            continue
        text = script.read_bytes()
        if before in text:
            script.write_bytes(text.replace(before, after))
