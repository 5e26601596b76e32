"""The code that attacks bring along: attempts of `tests/models/attacker`, made when it is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.e2e.hosting import MODELS

_CODE = """
import errno, sys, types

# The others import `tries_kernel`, which comes first.
for name, source in SOURCES.items():
    sys.modules[f"tries_{name}"] = made = types.ModuleType(name)
    exec(source, made.__dict__)

def word(what, arguments):
    name, _, function = what.partition(".")
    try:
        getattr(sys.modules[f"tries_{name}"], function)(**arguments)
        return "done"
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    except BaseException as error:
        return type(error).__name__

sys.outcomes_of_payload = {what: word(what, arguments) for what, arguments in TRIES.items()}
"""


def payload(tries: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return a file that makes these attempts, each `module.function` with its arguments."""
    names = ["kernel", *sorted({what.partition(".")[0] for what in tries})]
    sources = {name: (MODELS / "attacker" / f"tries_{name}.py").read_text() for name in names}
    return f"SOURCES = {sources!r}\nTRIES = {dict(tries)!r}\n{_CODE}".encode()
