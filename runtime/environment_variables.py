"""Which of the runtime's environment variables a model sees, and what to say to one that misses one."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping

from moonpool.ipc.policy import is_contained

# The variables that a contained model sees. Any other may be a secret.
_HARMLESS = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TERM",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME",
    "PYTHON*",
    "CUDA_*",
    "NVIDIA_*",
    "OMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "NUMEXPR_*",
    "TORCH_*",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_*",
)
# These lead to the files of the runtime's own interpreter.
OF_THE_INTERPRETER = ("PYTHONHOME", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "CONDA_PREFIX")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# How Python says that os.environ has no such variable.
_MISSED = re.compile(r"KeyError: '(\w+)'")


def inherited(
    given: Mapping[str, str],
    *,
    sandbox: str,
    allowed: Iterable[str] = (),
    own: Mapping[str, str] | None = None,
    leading: Iterable[str] = OF_THE_INTERPRETER,
    threads: int | None = None,
) -> dict[str, str]:
    """Return the variables of a stub: those of `given` that the sandbox lets through, and its environment's.

    A model that is not contained sees all of them, as in Triton: it could read them in the runtime's process as well.
    `allowed` are patterns (`AWS_*`) of variables that a contained one may see beside the harmless ones. `own` are those of a
    model's own environment. Such a model gets none of `leading`, which lead to the files of another interpreter.
    """
    variables = dict(given)
    if is_contained(sandbox):
        patterns = (*_HARMLESS, *allowed)
        variables = {name: value for name, value in given.items() if _matches(name, patterns)}
    if own:
        for name in leading:
            variables.pop(name, None)
        variables |= own
    if threads is not None:
        variables |= dict.fromkeys(_THREADS, str(threads))
    return variables


def missing_variable(message: str, given: Mapping[str, str], seen: Mapping[str, str]) -> str:
    """What to tell a model that failed for want of a variable which the runtime has, or nothing."""
    for name in _MISSED.findall(message):
        if name in given and name not in seen:
            return (
                f"\n{name} is set for the runtime, but a model in a sandbox sees it only if its "
                f"configuration names it in the parameter MOONPOOL_ENVIRONMENT."
            )
    return ""


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
