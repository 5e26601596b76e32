"""Sends thirty thousand requests of all kinds: at the end everything is as it was at the beginning."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
import time
from collections import Counter

import pytest
from tests.chaos.figures import rss_bytes
from tests.e2e.soaking import MODELS_BY_KIND, TASKS, THREADS, Soak, X, load_all, settle
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool

pytestmark = pytest.mark.promise(
    "Abuse", "Thirty thousand requests of all kinds leave memory, descriptors, regions and tables as they were."
)

REQUESTS = 30_000
WARM_UP = 10_000
# An allocator may keep so much memory, and the figures scatter.
GROWTH_BYTES = 4 << 20
REMEMBERED = "moonpool.runtime.stubs.layout."


class Figures:
    """The figures that could grow, in this process and in the stubs."""

    def __init__(self, runtime: moonpool.Runtime) -> None:
        self.rss_bytes = {"runtime": rss_bytes(os.getpid())}
        self.descriptors = {"runtime": descriptors(os.getpid())}
        self.shared_bytes: dict[str, int] = {}
        self.open: dict[str, int] = {}
        for name in MODELS_BY_KIND:
            hosted = hosted_in(runtime, name)
            (record,) = hosted.supervisor.records
            (row,) = runtime.instances(name)
            self.rss_bytes[name] = rss_bytes(row["pid"])
            self.descriptors[name] = descriptors(row["pid"])
            self.shared_bytes[name] = int(record.instance.state.link.size_bytes())
            self.open[name] = len(hosted.scheduler.open_requests) + hosted.scheduler.queued
        self.alive = alive(runtime)
        self.objects = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())

    @property
    def ours(self) -> dict[str, int]:
        """Count objects of this process by class, for classes of moonpool and asyncio."""
        return {
            name: count for name, count in self.objects.items() if name.startswith(("moonpool", "asyncio", "_asyncio"))
        }

    def __str__(self) -> str:
        rss = ", ".join(f"{name} {size >> 10} KiB" for name, size in self.rss_bytes.items())
        return (
            f"RSS {rss}; descriptors {self.descriptors}; shared bytes {self.shared_bytes}; "
            f"open {self.open}; objects of requests {self.alive}; "
            f"objects here {self.objects.total()}, of ours {sum(self.ours.values())}"
        )


def no_more(now: Figures, before: Figures) -> bool:
    """Return True if no process has more descriptors or shared memory than before."""
    pairs = ((now.descriptors, before.descriptors), (now.shared_bytes, before.shared_bytes))
    return all(found[name] <= wanted[name] for found, wanted in pairs for name in wanted)


def alive(runtime: moonpool.Runtime) -> int:
    """Count the objects of requests and responses in the stub of `plain`."""
    said = runtime.infer("plain", {"HOW": [["alive"]], "X": X[None]}, timeout_s=60.0)
    return int(said["Y"].ravel()[0])


def descriptors(pid: int) -> int:
    """Count the descriptors of a process; 0 if they cannot be read, as those of a model at `strict`."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        return 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thirty_thousand_requests_of_all_kinds_leave_nothing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    # pytest's own alarm is set for tests that take seconds; the mark above still holds.
    faulthandler.cancel_dump_traceback_later()
    # pytest would keep every line.
    caplog.set_level(logging.CRITICAL, "moonpool")
    caplog.set_level(logging.CRITICAL, "moonpool.stub")
    with moonpool.Runtime() as runtime:
        load_all(runtime)
        pids = [row["pid"] for name in MODELS_BY_KIND for row in runtime.instances(name)]
        soak = Soak(runtime)
        soak.all(WARM_UP)
        settle(runtime)
        before = Figures(runtime)
        soak.done.clear()

        started = time.monotonic()
        soak.all(REQUESTS)
        took_s = time.monotonic() - started

        settle(runtime)
        after = Figures(runtime)
        with capsys.disabled():
            sys.stdout.write(
                f"\n{sum(soak.done.values()):,} requests in {took_s:.1f} s: {dict(soak.done)}\n"
                f"before: {before}\nafter:  {after}\n"
            )
        assert [row["pid"] for name in MODELS_BY_KIND for row in runtime.instances(name)] == pids
        assert sum(soak.done.values()) >= REQUESTS - TASKS - THREADS
        # Files of /proc are open for a moment, and regions that are not needed any more for some seconds.
        wait_until(lambda: no_more(Figures(runtime), before), what=f"no more than {before}")
        assert after.open == dict.fromkeys(MODELS_BY_KIND, 0)
        # A thread of the model drops a sender a moment after the last response.
        wait_until(lambda: alive(runtime) <= before.alive)
        grown = {name: n - before.ours.get(name, 0) for name, n in after.ours.items()}
        # Layouts of batches are remembered, a bounded number of them.
        assert {name: n for name, n in grown.items() if n > 100 and not name.startswith(REMEMBERED)} == {}
        for name, size in after.rss_bytes.items():
            assert size - before.rss_bytes[name] < GROWTH_BYTES, name
