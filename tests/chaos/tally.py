"""The outcomes of all requests: one each, counted, and of a kind that is allowed."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Wrong(Exception):
    """A wrong answer of a model."""


# The longest time for a request without a timeout. A longer one is a hang.
PATIENCE_S = 60.0
ON_PURPOSE = r"on purpose|the model ended without a last response"
MEMORY = (
    r"MemoryError|[Cc]annot allocate|Unable to allocate|Memory allocation|cannot set aside"
    r"|can't start new thread|reached its memory limit"
)
DEATH = (
    r"Stub process '\S+' (is not healthy\. It (was killed by SIG(KILL|TERM|SEGV)|closed its channel"
    # This is a client's error, with the text that the log adds.
    r"|exited with \d (during|while)|exited with \d; its last words were: (moonpool\.ipc\.errors\.RemoteProtocolError: "
    r"|No more messages of the runtime are read: "
    # The stub writes these stacks on SIGTERM.
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
    """One request. `outcome` names its end, and is empty before; set it if that is neither an answer nor an error."""

    outcome = ""


class Tally:
    """Counts outcomes by model. Thread-safe."""

    def __init__(self, allowed: Mapping[str, str] | None = None) -> None:
        """`allowed` has the possible texts of errors by their class; those of `Runtime` by default."""
        self._lock = threading.Lock()
        self._allowed = ALLOWED if allowed is None else allowed
        self.sent: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        # Outcomes that must never happen, each with its request.
        self.faults: list[str] = []

    @contextmanager
    def request(self, model: str, kind: str, *, hurried: bool = False) -> Iterator[Request]:
        """Count the outcome of a request inside; its errors do not go on."""
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
        """Return what is wrong with an outcome; "" for an expected error."""
        name, text = type(error).__name__, str(error)
        if name == "RequestTimedOut" and hurried:
            return ""
        allowed = self._allowed.get(name, _NOTHING)
        return "" if re.search(allowed, text) else f"{name}: {text}"

    def check(self) -> None:
        """Raise AssertionError if a request has no outcome, or one that must not be."""
        assert self.faults == [], "\n".join(self.faults[:20])
        assert self.ended == self.sent

    def __str__(self) -> str:
        return f"{self.sent.total():,} requests {dict(self.sent)}: {dict(self.outcomes)}"
