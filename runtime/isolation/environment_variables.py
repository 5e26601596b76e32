"""Selects the environment variables of the runtime that a model sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moonpool.ipc.policy import is_contained
from moonpool.runtime.model.config.patterns import fits_any
from moonpool.runtime.process.terminal import harmless

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

# The most names in one line of the log, and the most characters of each.
_MOST_NAMES, _MOST_NAME = 64, 100


def inherited(
    given: Mapping[str, str],
    *,
    sandbox: str,
    allowed: Iterable[str] = (),
    own: Mapping[str, str] | None = None,
    leading: Iterable[str] = OF_THE_INTERPRETER,
    threads: int | None = None,
    withheld: Iterable[str] = (),
) -> dict[str, str]:
    """Return the variables of a stub: those of `given` that the sandbox lets through, and its environment's.

    A model that is not contained sees all of them, as in Triton, because it could read them in the runtime's process
    anyway. `allowed` are patterns (`AWS_*`) of variables that a contained one may see beside the harmless ones. `own`
    are those of a model's own environment. Such a model gets none of `leading`, which lead to the files of another
    interpreter. No model sees those of the patterns `withheld` that are not `allowed`.
    """
    allowed = tuple(allowed)
    variables = {
        name: value for name, value in given.items() if fits_any(allowed, name) or not fits_any(withheld, name)
    }
    if is_contained(sandbox):
        patterns = (*_HARMLESS, *allowed)
        variables = {name: value for name, value in variables.items() if fits_any(patterns, name)}
    if own:
        for name in leading:
            variables.pop(name, None)
        variables |= own
    if threads is not None:
        variables |= dict.fromkeys(_THREADS, str(threads))
    return variables


def unseen(given: Mapping[str, str], seen: Mapping[str, str]) -> str:
    """List the names of the variables of `given` that a model does not see, for one line of the log; "" if it sees
    all.
    """
    names = sorted(given.keys() - seen.keys())
    listed = [harmless(name[:_MOST_NAME]) for name in names[:_MOST_NAMES]]
    more = len(names) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "")
