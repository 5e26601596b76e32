"""Which interpreter runs a model, and the environment variables that belong to it.

Below the sandbox `best-effort` the interpreter of an environment is a program like any other: who may choose a
model's environment may run programs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.runtime.environment_error import BadEnvironment

if TYPE_CHECKING:
    from moonpool.runtime.environment_cache import EnvironmentCache

__all__ = ["BadEnvironment", "Environment", "resolve"]

MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter and the variables that its processes need beside the usual ones.

    A packed environment stays unpacked until `release`; the processes must have ended by then.
    """

    python: Path
    variables: Mapping[str, str]
    root: Path | None = None
    _release: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def release(self) -> None:
        """Say that no process uses it any more; a second call does nothing."""
        if self._release is not None:
            self._release()


def resolve(
    execution_env_path: str | None,
    model_directory: Path,
    *,
    cache: EnvironmentCache | None = None,
    inherited: Mapping[str, str] | None = None,
) -> Environment:
    """The environment that `EXECUTION_ENV_PATH` names; without one, moonpool's own interpreter.

    `inherited` (this process's environment unless given) is what PATH and LD_LIBRARY_PATH are
    prepended to.  Unpacking takes as long as it takes: call it off the event loop.  Raises
    BadEnvironment.
    """
    if execution_env_path is None:
        return _own_interpreter()
    path = _expanded(execution_env_path, model_directory)
    base = os.environ if inherited is None else inherited
    if path.is_dir():
        return _described(path, base, path)
    lease = (cache or _default_cache()).acquire(path)
    try:
        return _described(_top(lease.path), base, path, lease.release)
    except BaseException:
        lease.release()
        raise


def _default_cache() -> EnvironmentCache:
    # Few models have a packed environment, and what unpacks it takes a while to import.
    from moonpool.runtime.environment_cache import EnvironmentCache

    return EnvironmentCache()


def _own_interpreter() -> Environment:
    if not sys.executable:
        raise BadEnvironment(
            "this Python does not know its interpreter (sys.executable is empty);"
            " name one by EXECUTION_ENV_PATH"
        )
    return Environment(Path(sys.executable), {})


def _expanded(text: str, model_directory: Path) -> Path:
    if text.startswith(MODEL_DIRECTORY):
        text = str(model_directory) + text.removeprefix(MODEL_DIRECTORY)
    try:
        path = Path(os.path.abspath(text))
        path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadEnvironment(
            f"Failed to get the canonical path for {text}. ({reason}) EXECUTION_ENV_PATH must name"
            " an environment's directory or a packed environment (.tar, .tar.gz, .zip)."
        ) from None
    return path


def _top(root: Path) -> Path:
    """Where an unpacked environment begins: at the root, or in the one directory that is there."""
    if not (root / "bin").is_dir():
        inner = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
        if len(inner) == 1 and (inner[0] / "bin").is_dir():
            return inner[0]
    return root


def _described(
    root: Path,
    inherited: Mapping[str, str],
    shown: Path,
    release: Callable[[], None] | None = None,
) -> Environment:
    python = _interpreter(root, shown)
    # No LD_LIBRARY_PATH means the usual places; an empty entry in one means the current directory.
    libraries = [str(root / "lib"), inherited.get("LD_LIBRARY_PATH", "")]
    variables = {
        "PATH": f"{root / 'bin'}:{inherited.get('PATH') or _DEFAULT_PATH}",
        "LD_LIBRARY_PATH": ":".join(part for part in libraries if part),
    }
    if (root / "conda-meta").is_dir():
        variables["CONDA_PREFIX"] = str(root)
    else:
        variables |= {"VIRTUAL_ENV": str(root), "VIRTUAL_ENV_PROMPT": shown.name}
    return Environment(python, variables, root, release)


def _interpreter(root: Path, shown: Path) -> Path:
    for name in ("python", "python3"):
        python = root / "bin" / name
        if os.path.isfile(python) and os.access(python, os.X_OK):
            return python
        if os.path.exists(python):
            raise BadEnvironment(f"the environment {shown}: bin/{name} is no program")
        if os.path.islink(python):
            raise BadEnvironment(
                f"the environment {shown}: bin/{name} leads to {os.path.realpath(python)}, which is"
                " not there. Virtual environments need the Python they were made with; make this"
                " one again here, or pack a conda environment with conda-pack."
            )
    raise BadEnvironment(
        f"the environment {shown} has no bin/python. EXECUTION_ENV_PATH must name the directory of"
        " a virtual or conda environment, or one packed as .tar, .tar.gz or .zip."
    )
