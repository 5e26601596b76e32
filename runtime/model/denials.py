"""Counts and logs the denials that the stubs of a model report, and keeps samples to show.

A stub may lie in these reports, and hostile code may evade the hook that counts (`stub/sandbox/denials.py`). So they
only explain why an honest model does not work. Nothing is decided by them, and everything that is kept of them is
bounded.

Theory of operation. `DenialBook` has one lock around its counts and samples. The reactor's thread adds to them, and
threads of the server read them. Lines are logged outside of the lock, since a handler of the log may block.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.ipc.denials import FORK, KINDS, in_sentence, in_words, option_for, would_allow
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.terminal import one_line

_log = RuntimeLog("moonpool")
# The most samples that are kept of an instance.
MOST_TEXTS = 16
# An instance may log `_LINES` lines at once, then one in `_LINE_S` seconds, and the same line once in `_AGAIN_S`
# seconds.
_LINES = 8
_LINE_S = 10.0
_AGAIN_S = 3600.0


@dataclass(frozen=True)
class Denial:
    """The denials of one kind and text. The text is harmless to a terminal."""

    kind: str
    text: str
    count: int
    # The option of the model that would allow it, "" for none.
    option: str
    last_ms: int


class _Sample:
    def __init__(self) -> None:
        self.count = 0
        self.last_ms = 0
        self.logged_s = -_AGAIN_S


class _OfInstance:
    def __init__(self, now_s: float) -> None:
        self.counts = [0] * len(KINDS)
        # By kind and text, the latest last.
        self.samples: OrderedDict[tuple[int, str], _Sample] = OrderedDict()
        self.lines = float(_LINES)
        self.at_s = now_s
        self.unlogged = 0


class DenialBook:
    """The denials of all instances of a model, over all their processes. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._instances: dict[str, _OfInstance] = {}

    def add(self, instance: str, rows: Sequence[Sequence[Any]]) -> None:
        """Count the rows of one DENIALS message: kind, count and text. `instance` is the runtime's name for the
        sender.
        """
        lines = []
        with self._lock:
            now_s = self._clock()
            of = self._instances.setdefault(instance, _OfInstance(now_s))
            of.lines = min(_LINES, of.lines + (now_s - of.at_s) / _LINE_S)
            of.at_s = now_s
            for kind, count, text in rows:
                of.counts[kind] += count
                # A row without a text only counts. FORK never has one.
                if text or kind == FORK:
                    lines += self._note(of, kind, count, text, now_s)
        for line in lines:
            _log.info("[%s] %s", instance, line)

    def _note(self, of: _OfInstance, kind: int, count: int, text: str, now_s: float) -> list[str]:
        """Update a sample, and return the line to log, if any."""
        key = kind, text
        sample = of.samples.pop(key, None) or _Sample()
        of.samples[key] = sample
        if len(of.samples) > MOST_TEXTS:
            of.samples.popitem(last=False)
        sample.count += count
        sample.last_ms = time.time_ns() // 1_000_000
        is_new = now_s - sample.logged_s >= _AGAIN_S
        if not is_new or of.lines < 1:
            of.unlogged += count
            return []
        of.lines -= 1
        sample.logged_s = now_s
        times = f" ({count} times)" if count > 1 else ""
        others = f"; {of.unlogged} more refusals were not logged" if of.unlogged else ""
        of.unlogged = 0
        what, option = one_line(in_words(kind, text)), one_line(would_allow(kind, text))
        return [f"its sandbox did not let it {what}{times}; {option}{others}"]

    def instances(self) -> list[str]:
        """Return the names of the instances that have denials."""
        with self._lock:
            return list(self._instances)

    def counts(self, instance: str) -> dict[str, int]:
        """Return the number of denials of each kind. All are 0 for an instance without any."""
        with self._lock:
            of = self._instances.get(instance)
            return dict(zip(KINDS, of.counts if of else [0] * len(KINDS), strict=True))

    def since(self, instance: str, since_ms: int) -> str:
        """Return a clause with the latest denial since that time of the epoch, and the option that would allow it; ""
        for none.
        """
        found = [each for each in self.latest(instance) if each.last_ms >= since_ms]
        if not found:
            return ""
        kind, text = KINDS.index(found[0].kind), found[0].text
        options = one_line(in_sentence(each.option for each in found))
        return f"its sandbox did not let it {one_line(in_words(kind, text))}: {options}"

    def latest(self, instance: str) -> list[Denial]:
        """Return the samples, the latest first."""
        with self._lock:
            of = self._instances.get(instance)
            samples = list(of.samples.items())[::-1] if of else []
            return [
                Denial(KINDS[kind], one_line(text), sample.count, one_line(option_for(kind, text)), sample.last_ms)
                for (kind, text), sample in samples
            ]
