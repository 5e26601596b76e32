"""Environments of other Pythons than this one, with numpy, for models to run in."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MOONPOOL_TEST_ENVIRONMENTS"
# The folder that `bash .ci/run interpreters` fills.
USUAL = Path(__file__).parents[1] / ".venv-others"
WHY_NONE = f"{USUAL.name} is not here, and {VARIABLE} names no environments"


def made() -> list[Path]:
    """Return the environments that the variable names, separated by colons, or else the usual ones."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return sorted(USUAL.glob("*"))
    return [Path(path) for path in named.split(":") if path]


def of_version(version: str) -> Path | None:
    """One of these, whose folder begins with the version: `3.9`."""
    fitting = [path for path in made() if path.name.startswith(f"{version}.")]
    return fitting[0] if fitting else None
