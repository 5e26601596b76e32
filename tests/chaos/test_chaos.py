"""Runs models of all kinds under load while their stubs are killed, stopped, starved and sent nonsense, and send
nonsense.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import random
import sys
from functools import partial

import pytest
from tests.chaos.asking import CAST, COUNTED, Crowd, load_all
from tests.chaos.figures import Figures, children_of, figures_of, rss_bytes
from tests.chaos.monkey import Monkey
from tests.chaos.tally import Tally
from tests.e2e.soaking import is_quiet as is_done
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.model import budgets

pytestmark = pytest.mark.promise(
    "Chaos",
    "While stubs are killed, stopped, starved and sent nonsense, and send false messages "
    "themselves, every request has one outcome of an expected kind within its time, and every "
    "answer is right. Afterwards there are as many processes, descriptors, threads, regions and "
    "objects as before.",
)

# The first lap creates what stays: threads, caches, arenas of the allocator.
WARM_UP_S = 5.0
SETTLED_S = 120.0
# Memory that the allocators of C and Python keep for ended threads; each death has two of them. Ten laps in
# a row grew by 25 MiB in all, while objects stayed what they were.
GROWTH_BYTES = 32 << 20
GROWTH_BLOCKS = 10_000
# A stub must reject all of these packets.
MALFORMED = (b"\xc1", b"\x90", b"\x93\x63\xc0\xc0", b"\x94\x05\x01\x90", b"\xa5hello", b"\x91" * 500)


def feed(runtime: moonpool.Runtime, dice: random.Random) -> bool:
    """Send some stub a packet that the runtime never sends."""
    name = dice.choice(CAST)[0]
    record = dice.choice(hosted_in(runtime, name).supervisor.records)
    stub = record.instance.state
    if not hasattr(stub, "link"):
        return False
    channel = dice.choice((stub.link.conversation.channel, stub.control.channel))
    fd = channel.fileno()
    if fd < 0:
        return False
    try:
        copy = os.dup(fd)
    except OSError:
        return False
    try:
        # The channel is still open, so the copied descriptor was its own and not a later one of that number.
        if channel.fileno() == fd:
            os.write(copy, dice.choice(MALFORMED))
            return True
    except OSError:
        return False
    finally:
        os.close(copy)
    return False


def counted(runtime: moonpool.Runtime, model: str) -> int:
    """Return the number of requests that ended, from the model's statistics."""
    found = runtime.statistics(model)["inference_stats"]
    return int(found["success"]["count"] + found["fail"]["count"])


def lap(runtime: moonpool.Runtime, seed: int, seconds: float, spared: frozenset[int]) -> tuple[Tally, Monkey]:
    """Do everything at once for so many seconds, and check the outcomes."""
    tally = Tally()
    before = {name: counted(runtime, name) for name in COUNTED}
    monkey = Monkey(os.getpid(), random.Random(seed), partial(feed, runtime), spared)
    with Crowd(runtime, tally, seed) as crowd:
        monkey.harm_for(seconds)
    assert crowd.errors == [], f"{crowd.errors}"
    tally.check()
    wait_until(lambda: is_quiet(runtime), SETTLED_S, "nothing to be open")
    ended = {name: counted(runtime, name) - before[name] for name in COUNTED}
    sent = {name: tally.sent[name] for name in COUNTED}
    told = f"counted {ended}, sent {sent}; {tally}"
    # The next request of a lost sequence is refused, and no statistics count that.
    assert 0 <= sent.pop("sums") - ended.pop("sums") <= tally.outcomes["SequenceLost"], told
    assert ended == sent, told
    return tally, monkey


def is_quiet(runtime: moonpool.Runtime) -> bool:
    return all(is_done(hosted_in(runtime, name).scheduler) for name, *_ in CAST)


def settled(runtime: moonpool.Runtime) -> Figures:
    """Return the figures when every instance serves, and nothing is open or kept in reserve."""

    def is_settled() -> bool:
        rows = [row for name, *_ in CAST for row in runtime.instances(name)]
        return is_quiet(runtime) and all(row["state"] == "READY" for row in rows)

    wait_until(is_settled, SETTLED_S, "every instance to serve and nothing to be open")
    gc.collect()
    return figures_of(os.getpid())


def check_returned(runtime: moonpool.Runtime, wanted: Figures) -> None:
    """Wait until the figures are as before: regions in reserve are given up after some seconds."""
    now = wanted

    def is_settled() -> bool:
        nonlocal now, wanted
        now = settled(runtime)
        # Threads that had nothing to do may have ended since then.
        wanted = wanted._replace(threads=min(wanted.threads, now.threads))
        return now == wanted

    with contextlib.suppress(AssertionError):
        wait_until(is_settled, SETTLED_S)
    assert now == wanted, f"{now} and not {wanted}"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_request_has_one_outcome_under_chaos_and_nothing_is_left(
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulthandler.cancel_dump_traceback_later()
    # Memory that grew is given up soon, so that the end of the test need not wait for it.
    monkeypatch.setattr(budgets, "KEEP_FIRST_MS", 1000)
    monkeypatch.setattr(budgets, "KEEP_MS", 1000)
    caplog.set_level(logging.CRITICAL, "moonpool")
    caplog.set_level(logging.CRITICAL, "moonpool.stub")
    seed, seconds = pytestconfig.option.chaos_seed, pytestconfig.option.chaos_seconds
    # Other tests may have long-lived runtimes in this process.
    others = frozenset(children_of(os.getpid()))
    with moonpool.Runtime() as runtime:
        load_all(runtime, seed)
        # The first region for `empty` arrays is never given back, so it exists before the first count.
        runtime.empty("wide", "X", 1)
        at_first = settled(runtime)
        lap(runtime, seed + 1, min(WARM_UP_S, seconds), others)
        check_returned(runtime, at_first)
        before_bytes, before_blocks = rss_bytes(os.getpid()), sys.getallocatedblocks()

        tally, monkey = lap(runtime, seed, seconds, others)

        check_returned(runtime, at_first)
        grown = rss_bytes(os.getpid()) - before_bytes
        more_blocks = sys.getallocatedblocks() - before_blocks
        with capsys.disabled():
            sys.stdout.write(
                f"\nseed {seed}, {seconds:g} s: {tally}\n"
                f"harm: {dict(monkey.harms)}; RSS {before_bytes >> 10} KiB, {grown >> 10} KiB more, "
                f"{more_blocks} blocks of objects more\n"
            )
        assert more_blocks < GROWTH_BLOCKS
        assert grown < GROWTH_BYTES
