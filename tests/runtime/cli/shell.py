"""The command line as users have it: another process, whose output is read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.dispositions import default_signals

import moonpool

PATIENCE_S = 120.0
PACKAGE = Path(next(iter(moonpool.__path__)))
MODELS = PACKAGE / "examples" / "models"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, with a moonpool that need not be installed and nothing about colours."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")
    }
    return {**kept, "PYTHONPATH": str(PACKAGE.parent), "TERM": "xterm", **(extra or {})}


class CommandLine:
    """Runs moonpool in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "moonpool", *map(str, arguments)]

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run it to its end; whatever it is, there is no traceback."""
        ended = subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=environment(),
            timeout=PATIENCE_S,
        )
        if "Traceback" in ended.stderr:
            pytest.fail(f"a traceback for {arguments}:\n{ended.stderr}", pytrace=False)
        return ended

    def start(
        self, *arguments: object, stdout: int | None, stderr: int | None, **variables: str
    ) -> subprocess.Popen[bytes]:
        with default_signals():
            return subprocess.Popen(
                self.command(*arguments),
                stdout=stdout,
                stderr=stderr,
                cwd=self.folder,
                env=environment(variables),
            )


def write_model(repository: Path, name: str, code: str, config: str = "") -> Path:
    """A model of one version; returns its file."""
    file = repository / name / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(code)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return file
