"""Tables of attempts, and where the things are that they are made on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.hostile.attacker import Attacker, Outcome

# A layer refuses in one of these ways: Landlock with EACCES, seccomp with EPERM or by ending the process.
REFUSED = ("EACCES", "EPERM", "killed")
# In a mount namespace, everything that is not granted is mounted read-only, whatever its owner and mode.
UNCHANGED = (*REFUSED, "EROFS")


@dataclass(frozen=True)
class Attempt:
    """One thing to try. A text in `arguments` that begins with $ stands for something of the scene."""

    what: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    # Outcomes that are allowed at strict.
    strict: tuple[str, ...] = REFUSED
    # Outcomes where nothing stops it; empty if they depend on the machine.
    off: tuple[str, ...] = ("done",)


def made(attacker: Attacker, attempt: Attempt, scene: Mapping[str, Any]) -> Outcome:
    """Make an attempt on an object of the scene, and return its outcome."""
    arguments = {
        key: scene[value[1:]] if isinstance(value, str) and value.startswith("$") else value
        for key, value in attempt.arguments.items()
    }
    return attacker.tries(attempt.what, **arguments)
