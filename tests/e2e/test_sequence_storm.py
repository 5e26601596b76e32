"""Runs many sequences at once, with callers that leave and processes that die: no sum is wrong, and nothing is left
behind.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, hosted, open_to_all, options
from tests.e2e.sequence_client import END, PATIENCE_S, START
from tests.e2e.test_iterative import config as countdown
from tests.e2e.test_sequences import STRATEGIES, config
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import SequenceLost

CLIENTS, SEQUENCES, GENERATIONS = 12, 40, 30
UNTIRING = options(MAX_RESTARTS=1000, RESTART_BACKOFF_S=0, RESTART_BACKOFF_MAX_S=0)


class Storm:
    """Clients with a sequence each, again and again. The outcomes of their requests are counted."""

    def __init__(self, runtime: moonpool.Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def client(self, number: int) -> None:
        dice = random.Random(number)
        for _ in range(SEQUENCES):
            self._sequence(number + 1, dice)

    def _sequence(self, which: int, dice: random.Random) -> None:
        steps = dice.randint(1, 12)
        wanted = 0.0
        for step in range(steps):
            x = float(dice.randint(1, 9))
            flags = START * (step == 0) | END * (step == steps - 1)
            dies, leaves = dice.random() < 0.004, dice.random() < 0.03
            try:
                wanted += x
                response = self._runtime.request(
                    "m",
                    {"X": np.full((1, 1), -1 if dies else x, np.float32)},
                    timeout_s=0.0005 if leaves else PATIENCE_S,
                    correlation_id=which,
                    flags=flags,
                )
            except moonpool.MoonpoolError as error:
                self._count(type(error).__name__)
                return  # nobody knows any more what the model has of the sequence
            self._count("answered")
            found = float(str(response.outputs["Y"].item(), "utf-8").partition('"sum": ')[2].split(",")[0])
            if found != wanted:
                self.wrong.append(f"sequence {which}: {found} and not {wanted}")

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


@pytest.mark.promise("Sequences", "The requests of a sequence go …")
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_every_sum_is_right_in_a_storm_and_nothing_is_left(runtime: moonpool.Runtime, strategy: dict[str, Any]) -> None:
    made = config(max_batch_size=2, max_sequence_idle_microseconds=3_000_000, **strategy)
    made |= UNTIRING
    with hosted(runtime, "m", MODELS / "sequences.py", made, 3):
        storm = Storm(runtime)
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(storm.client, number) for number in range(CLIENTS)]:
                done.result(2 * PATIENCE_S)
        assert storm.wrong == []
        assert storm.counts["answered"] > 100, storm.counts
        assert storm.counts["StubDied"]
        assert storm.counts["RequestTimedOut"]
        assert set(storm.counts) <= {"answered", "RequestTimedOut", "StubDied", SequenceLost.__name__}
        check_empty(runtime)


def check_empty(runtime: moonpool.Runtime) -> None:
    scheduler = hosted_in(runtime, "m").scheduler
    wait_until(lambda: not scheduler.queued and not scheduler.executing)
    sequencer = scheduler._queue._sequencer  # type: ignore[attr-defined]
    assert not sequencer._executing
    wait_until(lambda: not sequencer._open, what="idle sequences to end by themselves")
    assert not sequencer._idle
    assert not sequencer._backlog
    assert not any(any(table.slots) for table in sequencer._tables.values())


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_generations_that_are_left_and_killed_leave_nothing(
    runtime: moonpool.Runtime, tmp_path: Path, *, is_decoupled: bool
) -> None:
    made = countdown(is_decoupled=is_decoupled, iterative_sequence=True)
    made |= UNTIRING
    counts: Counter[str] = Counter()
    open_to_all(tmp_path / "log")

    def client(number: int) -> None:
        dice = random.Random(number)
        for _ in range(GENERATIONS):
            steps = dice.randint(1, 20)
            log: dict[str, Any] = {"log": str(tmp_path / "log")}
            if dice.random() < 0.01:
                log["dies_at"] = 1
            leaves = dice.random() < 0.1
            stream = runtime.stream(
                "m",
                {"X": np.full((1, 1), steps, np.float32)},
                timeout_s=0.002 if leaves else PATIENCE_S,
                parameters=log,
            )
            try:
                found = [each.outputs["Y"].item() for each in stream]
            except moonpool.MoonpoolError as error:
                counts[type(error).__name__] += 1
            else:
                assert found == (list(range(steps - 1, -1, -1)) if is_decoupled else [0])
                counts["answered"] += 1

    with hosted(runtime, "m", MODELS / "generates.py", made, 2):
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(client, number) for number in range(CLIENTS)]:
                done.result(2 * PATIENCE_S)
        assert counts["answered"] > 50, counts
        assert counts["StubDied"]
        assert counts["RequestTimedOut"]
        assert set(counts) <= {"answered", "RequestTimedOut", "StubDied", SequenceLost.__name__}
        check_empty(runtime)
        wait_until(lambda: not len(hosted_in(runtime, "m").scheduler.open_requests))
