"""The Dockerfile's own commands run in an empty environment, and make what its entry point starts.

No image is made: neither a daemon nor a base image can be had here. The commands are those of the file; only what is
compiled and what other packages are needed is left out, as CI's part `wheel` has these.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.deploy.manifests import DEPLOY

ROOT = DEPLOY.parent
LEFT_OUT = {"MOONPOOL_BUILD_EXTENSIONS": "0", "PIP_NO_DEPS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

pytestmark = [
    pytest.mark.skipif(not DEPLOY.is_dir(), reason="only the tests are here, not the Dockerfile"),
    pytest.mark.slow,
    pytest.mark.timeout(180),
]


class Step(NamedTuple):
    """An instruction and its arguments."""

    name: str
    text: str


def steps() -> list[Step]:
    """Return the instructions of the file."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    lines = filter(None, text.replace("\\\n", " ").splitlines())
    return [Step(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def copy_context(folder: Path) -> None:
    """Copy what is sent to the builder: what the list of ignored files excepts, without what it names."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    ignored = [line for line in lines[1:] if not line.startswith("!")]
    names = [line.removeprefix("**/") for line in ignored if line.startswith("**/")]
    assert lines[0] == "*"
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                folder / name,
                symlinks=True,
                ignore=shutil.ignore_patterns(*names, "env", "build", "*.egg-info"),
            )
        else:
            shutil.copy(ROOT / name, folder)


class Builder:
    """Does the steps below a folder, with an interpreter of its own in place of the image's."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._at = folder, folder
        self._variables: dict[str, str] = {}
        self.python = folder / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.python], check=True)
        # This interpreter's pip works for the other one.
        pip = self.python / "bin" / "pip"
        words = shlex.join([sys.executable, "-m", "pip", "--python", f"{self.python}/bin/python"])
        pip.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        pip.chmod(0o755)

    def _inside(self, path: str) -> Path:
        return self._folder / path.lstrip("/")

    def do(self, step: Step) -> None:
        """Do a step; those that the builder itself has, such as USER, change nothing here."""
        if step.name == "ARG":
            name, _, value = step.text.partition("=")
            self._variables[name] = value
        elif step.name == "WORKDIR":
            self._at = self._inside(step.text)
            self._at.mkdir(parents=True)
        elif step.text == ". .":
            copy_context(self._at)
        elif step.name == "COPY":
            _, source, target = step.text.split()
            shutil.copytree(self._inside(source), self._at / target)
        elif step.name == "RUN" and "apt-get" not in step.text:
            self._run(step.text)

    def _run(self, command: str) -> None:
        path = f"{self.python / 'bin'}:{os.environ['PATH']}"
        ended = subprocess.run(
            ["sh", "-c", command],
            cwd=self._at,
            env={**os.environ, **LEFT_OUT, **self._variables, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.promise(
    "Past one machine",
    "The commands of `deploy/Dockerfile` build a wheel from the files that are sent to the builder, with all modules, "
    "and install the program that is its entry point.",
)
def test_its_commands_make_the_program(tmp_path: Path) -> None:
    builder = Builder(tmp_path)
    all_steps = steps()
    for step in all_steps:
        builder.do(step)
        if step.name == "COPY" and "--from" in step.text:
            (wheel,) = tmp_path.rglob("opt/moonpool/wheels/*.whl")
            with zipfile.ZipFile(wheel) as archive:
                packed = {name for name in archive.namelist() if name.endswith(".py")}

    folders = {"ipc", "runtime", "stub"}
    missing = {
        f"moonpool/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")
    } - packed
    assert missing == set()
    (entry,) = (json.loads(step.text) for step in all_steps if step.name == "ENTRYPOINT")
    assert entry == ["moonpool", "serve"]
    program = (builder.python / "bin" / entry[0]).read_text()
    assert "from moonpool.__main__ import main" in program
    assert not (tmp_path / "opt/moonpool/wheels").exists()


def test_nobody_is_root() -> None:
    (user,) = (step.text for step in steps() if step.name == "USER")

    assert user == "10001:10001"
