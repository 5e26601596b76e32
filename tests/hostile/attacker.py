"""A model that makes attempts on request, and their outcomes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.e2e.hosting import ECHO, MODELS, Config, options, tensor

import moonpool

FOLDER = MODELS / "attacker"
SIGNATURE: Config = {"input": [tensor("ATTEMPT", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}
# As many deaths as there are attempts, each with a restart at once.
PATIENT: Mapping[str, object] = {"RESTART_WINDOW_S": 0.001}
X = np.arange(4, dtype=np.float32)


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt. Exactly one of the first four fields is not None.

    `done` is what the model got, `refused` the name of the kernel's error, `raised` that of another exception, and
    `died` the error that the caller got when the model's process ended. `by` is the number that the process which
    made the attempt has for itself.
    """

    done: Any = None
    refused: str | None = None
    raised: str | None = None
    died: str | None = None
    text: str = ""
    by: int = 0

    @property
    def word(self) -> str:
        """`done`, `EPERM`, `ValueError`, `killed` by the kernel for the call itself, or `died`."""
        if self.died is not None:
            return "killed" if "SIGSYS" in self.died else "died"
        return self.refused or self.raised or "done"


class Attacker:
    """One instance of the model, at one level of the sandbox."""

    def __init__(self, runtime: moonpool.Runtime, name: str) -> None:
        self.runtime = runtime
        self.name = name

    def tries(self, what: str, **arguments: object) -> Outcome:
        """Try `module.function` of `tests/models/attacker` with these arguments."""
        text = json.dumps([what, arguments])
        try:
            outputs = self.runtime.infer(self.name, {"ATTEMPT": [text]}, timeout_s=120.0)
        except (moonpool.StubDied, moonpool.ExecuteTimedOut) as error:
            return Outcome(died=str(error), text=str(error))
        except moonpool.ModelError as error:
            return Outcome(raised="ModelError", text=str(error))
        if "SAID" not in outputs:
            return Outcome(raised="nothing was said")
        return Outcome(**json.loads(outputs["SAID"][0]))

    def finds(self, what: str, **arguments: object) -> Any:
        """Make an attempt as `tries` does, which must succeed."""
        outcome = self.tries(what, **arguments)
        if outcome.word != "done":
            raise AssertionError(f"{what} gave {outcome}")
        return outcome.done

    @property
    def pid(self) -> int:
        pid = self.runtime.instances(self.name)[0]["pid"]
        if not isinstance(pid, int):
            raise TypeError(f"{self.name} has no process")
        return pid


def copied(folder: Path) -> Path:
    """The attacker in a model directory of its own, which it may read."""
    shutil.copytree(FOLDER, folder / "1", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def load_attacker(runtime: moonpool.Runtime, level: str, source: Path, name: str = "", **settings: object) -> Attacker:
    """Load it at this level, with these options of a model."""
    name = name or f"attacker_{level}".replace("-", "_")
    config = SIGNATURE | options(**{"SANDBOX": level, **PATIENT, **settings})
    runtime.load(name, source, config=config)
    return Attacker(runtime, name)


def load_sibling(runtime: moonpool.Runtime, name: str = "sibling", **settings: object) -> None:
    """Another model, which is to notice nothing."""
    runtime.load(name, MODELS / "echo.py", config=ECHO | options(**settings))


def answers(runtime: moonpool.Runtime, name: str = "sibling") -> bool:
    """Return True if the other model works."""
    return np.array_equal(runtime.infer(name, {"X": X}, timeout_s=60.0)["OUT_X"], X)
