"""Denials: the kinds of acts that a sandbox refuses a model, and the options that would allow them.

A *denial* is a kind and a text: a path, `host:port`, a family and type of socket, a program, a process. The model
chooses the text, so it is hostile until it was checked, and `option_for` puts it into an option only if the option
could be read again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

# In the order of their numbers on the wire.
KINDS = ("open", "write", "socket", "bind", "connect", "resolve", "fork", "exec", "kill")
OPEN, WRITE, SOCKET, BIND, CONNECT, RESOLVE, FORK, EXEC, KILL = range(len(KINDS))
# The longest text of a denial.
MAX_BYTES = 1024
# The most texts in one message. Further denials are only counted, in one row for each kind.
MAX_TEXTS = 8
MAX_ROWS = MAX_TEXTS + len(KINDS)
MAX_COUNT = 2**32 - 1

_WORDS = {
    OPEN: "read",
    WRITE: "write to",
    SOCKET: "make a socket of",
    BIND: "listen at",
    CONNECT: "connect to",
    RESOLVE: "find the address of",
    FORK: "start a process",
    EXEC: "start the program",
    KILL: "signal process",
}
CALLS, PATHS, PORTS = ("MOONPOOL_SANDBOX_SYSCALLS", "MOONPOOL_SANDBOX_PATHS", "MOONPOOL_SANDBOX_PORTS")
TCP, UNIX = "TCP", "Unix"
# In the text of an error, the option that would allow the act follows these words.
TOLD = "the sandbox refused it: "
_ANY_PORT = re.compile(r":([0-9]{1,5})\Z")
# A path that is one word for a shell, for config.pbtxt and in a sentence. Operators paste options, and the model
# chooses the path: with quotes or `$(…)` in it, it would run the model's command in the operator's shell. With spaces
# in it, it would not be recognized as one path when folders are removed from texts for clients. A path below /proc/PID
# is gone when the process is.
_PATH = re.compile(r"(?!/proc/[0-9])(?:/[\w@%+.-]+)+")


def in_words(kind: int, text: str) -> str:
    """Return such words as `read /data/weights`, to stand after `its sandbox did not let it`."""
    return f"{_WORDS[kind]} {text}".rstrip()


def option_for(kind: int, text: str) -> str:
    """Return such an option as `MOONPOOL_SANDBOX_PATHS=ro:/data/weights`; "" if no option allows it.

    If a path cannot stand in an option, or a port is not known, the option is named without its value.
    """
    if kind in (OPEN, WRITE):
        # A granted path has to exist, and a file that a model writes often does not exist yet.
        path = os.path.dirname(text) if kind == WRITE else text
        access = "rw" if kind == WRITE else "ro"
        return f"{PATHS}{f'={access}:{path}' if _is_pasteable(path) else ''}"
    if kind in (CONNECT, RESOLVE):
        port = _ANY_PORT.search(text)
        if port is None or not 0 < int(port[1]) < 65536:
            return PORTS
        # libc asks for names over TCP.
        also = ",53" if kind == RESOLVE and port[1] != "53" else ""
        return f"{PORTS}={int(port[1])}{also}"
    if kind == SOCKET:
        by_family = {TCP: PORTS, UNIX: f"{CALLS}=unix"}
        return by_family.get(text, "")
    return {FORK: f"{CALLS}=fork", EXEC: f"{CALLS}=fork,execve"}.get(kind, "")


def would_allow(kind: int, text: str) -> str:
    """Return `MOONPOOL_SANDBOX_PATHS=ro:/data/weights would allow it`, or that no option does."""
    return in_sentence([option_for(kind, text)])


def in_sentence(options: Iterable[str]) -> str:
    """Return the clause that these options would allow it, or that none does. Values of one option are joined, each
    once.
    """
    values: dict[str, dict[str, None]] = {}
    for option, _, value in (each.partition("=") for each in options if each):
        values.setdefault(option, {}).update(dict.fromkeys(filter(None, value.split(","))))
    said = [f"{option}={','.join(found)}" if found else option for option, found in values.items()]
    return f"{' and '.join(said)} would allow it" if said else "no option allows it"


def _is_pasteable(path: str) -> bool:
    # A path of this length may have been cut.
    is_whole = len(path.encode("utf-8", "replace")) < MAX_BYTES
    return is_whole and _PATH.fullmatch(path) is not None and os.path.normpath(path) == path
