"""What became of every request: one outcome each, counted, and of a kind that is allowed."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Wrong(Exception):
    """An answer that is not what the model must have answered."""


# How long a request may take that is not in a hurry: more is a hang.
PATIENCE_S = 30.0
ON_PURPOSE = r"on purpose|the model ended without a last response"
MEMORY = (
    r"MemoryError|[Cc]annot allocate|Unable to allocate|Memory allocation|cannot set aside"
    r"|can't start new thread|reached its memory limit"
)
DEATH = (
    r"Stub process '\S+' (is not healthy\. It (was killed by SIG(KILL|TERM|SEGV)|closed its channel"
    # What a client is told, and what the log has beside it.
    r"|exited with \d (during|while)|exited with \d; its last words were: (moonpool\.ipc\.errors\.RemoteProtocolError: "
    r"|A process of the runtime is not listened to any more: "
    # The stacks that it writes when it is told to end.
    r"|<no Python frame>|File \"))"
    r"|broke the protocol and was ended|took longer than \S+ s to execute a batch and was ended"
    r"|cannot be told anything any more)"
)


ALLOWED = {
    "StubDied": f"{DEATH}|{MEMORY}",
    "ExecuteTimedOut": DEATH,
    "ModelError": f"{DEATH}|{MEMORY}|{ON_PURPOSE}",
    "OutOfMemory": MEMORY,
    "SequenceLost": "",
}
_NOTHING = "$."


class Request:
    """`outcome` is a word for what it ended with, empty before; set it where that is no answer and no error."""

    outcome = ""


class Tally:
    """Counts by model. From any thread."""

    def __init__(self, allowed: Mapping[str, str] | None = None) -> None:
        """`allowed` has by an error's class what its text may be; that of `Runtime` by default."""
        self._lock = threading.Lock()
        self._allowed = ALLOWED if allowed is None else allowed
        self.sent: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        # What must never be, each with the request that it was the outcome of.
        self.faults: list[str] = []

    @contextmanager
    def request(self, model: str, kind: str, *, hurried: bool = False) -> Iterator[Request]:
        """Around the whole of a request, whose outcome is what it ends with; errors are taken."""
        request = Request()
        with self._lock:
            self.sent[model] += 1
        try:
            yield request
        except Exception as error:
            request.outcome = type(error).__name__
            fault = self._fault(error, hurried=hurried)
        except BaseException:
            request.outcome, fault = "interrupted", "interrupted"
            raise
        else:
            request.outcome, fault = request.outcome or "answered", ""
        finally:
            self._count(model, request.outcome, fault and f"{kind} of {model}: {fault}")

    def _count(self, model: str, outcome: str, fault: str) -> None:
        with self._lock:
            self.ended[model] += 1
            self.outcomes[outcome] += 1
            if fault:
                self.faults.append(fault)

    def _fault(self, error: Exception, *, hurried: bool) -> str:
        """What is wrong with an outcome; nothing with errors that must be expected."""
        name, text = type(error).__name__, str(error)
        if name == "RequestTimedOut" and hurried:
            return ""
        allowed = self._allowed.get(name, _NOTHING)
        return "" if re.search(allowed, text) else f"{name}: {text}"

    def check(self) -> None:
        """Raises AssertionError where a request has no outcome, or one that must not be."""
        assert self.faults == [], "\n".join(self.faults[:20])
        assert self.ended == self.sent

    def __str__(self) -> str:
        return f"{self.sent.total():,} requests {dict(self.sent)}: {dict(self.outcomes)}"
