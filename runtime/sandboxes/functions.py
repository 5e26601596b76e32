"""Lets source call functions of its caller by name. The other end is `stub/source/functions`.

What comes is hostile: a name that there is not, arguments that no signature has, calls without an end. Arguments are
bounded as answers are, calls are counted, and a flood of them ends with the time of the run.
"""

from __future__ import annotations

import inspect
import keyword
import time
from collections.abc import Callable, Mapping
from typing import Any

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.source import values
from moonpool.runtime.arguments import OF_RUNTIME
from moonpool.runtime.process.parallel import Here
from moonpool.runtime.sandboxes.printed import shown

# Makes the reply to a call that source has sent.
Serve = Callable[[Any], values.Written]
_MOST_FUNCTIONS = 1000
# Of an error, the source gets as much.
_MOST_TEXT = 10_000


def read_functions(
    functions: Mapping[str, Callable[..., Any]] | None, inputs: Mapping[str, Any]
) -> dict[str, Callable[..., Any]]:
    """Check the functions that source may call. Raises ValueError."""
    found = dict(OF_RUNTIME.map("functions", functions or {}, "a map of names to functions"))
    if len(found) > _MOST_FUNCTIONS:
        OF_RUNTIME.refuse("functions", f"{_MOST_FUNCTIONS} functions at most", len(found))
    for name, function in found.items():
        if not (isinstance(name, str) and name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
            OF_RUNTIME.refuse("functions", "a map of names that Python can call", name)
        if name in inputs:
            OF_RUNTIME.refuse("functions", "a map without names of inputs", name)
        if not callable(function):
            OF_RUNTIME.refuse(f"functions[{name}]", "a function", function)
        if inspect.iscoroutinefunction(function):
            OF_RUNTIME.refuse(f"functions[{name}]", "a function that is not a coroutine", function)
    return found


class HostCalls:
    """Answers the calls of one run."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], most: int, here: Here) -> None:
        """Make calls of the functions by `here`, so many at most."""
        self._functions, self._most, self._here = functions, most, here
        self.count = 0
        # The time that they took.
        self.wall_s = 0.0

    def answer(self, call: Any) -> values.Written:
        """Make a call, and return what the source gets of it. Raises `RemoteProtocolError`, `Abandoned`."""
        if not isinstance(call, list) or len(call) != 3:
            raise RemoteProtocolError("a packet that is not a call")
        name, arguments, named = call
        if not isinstance(name, str) or not isinstance(arguments, list) or not isinstance(named, dict):
            raise RemoteProtocolError("a packet that is not a call")
        if not all(isinstance(key, str) for key in named):
            raise RemoteProtocolError("a call with arguments of no name")
        self.count += 1
        if self.count > self._most:
            return _reply(error=f"{name:.100} is not called: these are more than {self._most} calls", limit="calls")
        function = self._functions.get(name)
        if function is None:
            names = ", ".join(sorted(self._functions))
            return _reply(error=f"there is no function {name:.100}; there are: {names:.1000}")
        began_s = time.monotonic()
        try:
            value, error = self._here(lambda: _result_of(function, arguments, named))
        finally:
            self.wall_s += time.monotonic() - began_s
        if error:
            return _reply(error=error)
        try:
            return _reply(value)
        except values.Unsendable as why:
            return _reply(error=f"what {name:.100} returned does not travel: {why}")


def _result_of(function: Callable[..., Any], arguments: list[Any], named: dict[str, Any]) -> tuple[Any, str]:
    """Return the result of a function of the caller, or the text of what it raised, which is for the source alone."""
    try:
        return function(*arguments, **named), ""
    except Exception as error:
        return None, shown(f"{type(error).__name__}: {error}"[:_MOST_TEXT])


def _reply(value: Any = None, error: str | None = None, limit: str = "") -> values.Written:
    return values.write({"value": value, "error": error, "limit": limit})
