"""Models that speak past their stub: on its channels, and in the memory that it shares with the runtime.

`tests/e2e/test_misbehaving_stub.py` has every way to break the protocol; here are those that an attacker would choose,
from inside a real stub and its sandbox.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import answers, load_attacker
from tests.hostile.conftest import Attackers
from tests.waiting import Deadline, wait_until

import moonpool

SECRET = "a client's own words"
LEVELS = ["standard", "strict"]

pytestmark = pytest.mark.parametrize("level", LEVELS)

# Each has the attempt, its arguments, and a part of the log line about it.
LIES: dict[str, tuple[str, dict[str, object], str]] = {
    "bytes that are no message": ("say_garbage", {}, "a packet that is not msgpack"),
    "a pickle": ("say_pickle", {}, "broke the protocol"),
    "a type of its own": ("say_extension", {}, "broke the protocol"),
    "a packet that is too long": ("say_too_much", {}, "a packet of more than"),
    "arrays in arrays": ("say_nested", {}, "broke the protocol"),
    "an array without end": ("say_bomb", {}, "broke the protocol"),
    "an answer to another batch": ("answer_lie", {"number": 999}, "an answer to batch 999"),
    "memory of nobody": ("answer_lie", {"region": 2**40}, "not the stub's to answer from"),
    "a place far away": ("answer_lie", {"at": 2**40}, "a block of 16 bytes at"),
    "a place that overflows": ("answer_lie", {"at": 2**63 - 8}, "broke the protocol"),
    "a place before the beginning": ("answer_lie", {"at": -64}, "broke the protocol"),
    "a size that overflows": ("answer_lie", {"size": 2**63 - 1}, "broke the protocol"),
    "dimensions that overflow": ("answer_lie", {"shape": [2**32, 2**32]}, "broke the protocol"),
    "a negative dimension": ("answer_lie", {"shape": [-4]}, "broke the protocol"),
    "65 dimensions": ("answer_lie", {"shape": [1] * 65}, "broke the protocol"),
    "true for a dimension": ("answer_lie", {"shape": [True]}, "broke the protocol"),
    "not a number": ("answer_not_a_number", {}, "broke the protocol"),
    "objects of Python": ("answer_lie", {"datatype": 79}, "broke the protocol"),
    "a datatype by its name": ("answer_lie", {"datatype": "V2147483647"}, "broke the protocol"),
    "a class": ("answer_lie", {"datatype": "O"}, "broke the protocol"),
    "a flood of releases": ("flood_releases", {}, "broke the protocol"),
    "a flood of growth": ("flood_growth", {}, "before the last one was answered"),
}


@pytest.mark.promise(
    "The sandbox: `standard`",
    "The first message that breaks the protocol ends the process, and the log names it: "
    "malformed bytes, pickles, bombs, overflowing sizes and offsets, unrequested answers, floods.",
)
@pytest.mark.parametrize("lie", LIES)
def test_the_first_lie_ends_the_process_and_is_told(
    attackers: Attackers, caplog: pytest.LogCaptureFixture, level: str, lie: str
) -> None:
    what, arguments, words = LIES[lie]
    attacker = attackers(level)
    pid = attacker.pid

    outcome = attacker.tries(f"protocol.{what}", **arguments)

    assert outcome.died is not None, outcome
    assert words in outcome.died
    assert words in caplog.text
    assert not os.path.exists("/tmp/moonpool-was-unpickled")
    assert attacker.finds("kernel.make", name="getpid") != pid


@pytest.mark.promise("The sandbox: `standard`", "The first message …")
def test_a_second_answer_is_one_too_many(attackers: Attackers, level: str) -> None:
    attacker = attackers(level)
    outcome = attacker.tries("protocol.flood_answers")
    if outcome.died is None:
        # The first answer was due, although it is empty. In memory the next ones may have overwritten it.
        assert outcome.raised == "nothing was said"
        outcome = attacker.tries("kernel.make", name="getpid")

    assert any(words in str(outcome.died) for words in ("an answer to batch", "out of turn"))
    assert attacker.finds("kernel.make", name="getpid") == attacker.pid


REGIONS = {"truncate_region": ("EPERM",), "grow_region": ("EPERM", "EFBIG"), "seal_region": ("EPERM", "EACCES")}


@pytest.mark.promise(
    "The sandbox: `standard`",
    "A model can neither truncate nor enlarge shared memory, so reading it kills nobody. The memory has no name.",
)
@pytest.mark.parametrize("what", REGIONS)
def test_shared_memory_stays_as_it_was_made(attackers: Attackers, level: str, what: str) -> None:
    """Whatever reads it after the end had been cut away would be killed by SIGBUS."""
    assert attackers(level).tries(f"protocol.{what}").word in REGIONS[what]


@pytest.mark.promise("The sandbox: `standard`", "A model can …")
def test_beyond_a_region_there_is_nothing(attackers: Attackers, level: str) -> None:
    outcome = attackers(level).tries("protocol.map_beyond_region")

    # mmap.mmap refuses a length beyond the end of the file.
    assert outcome.raised == "ValueError", outcome


@pytest.mark.promise("The sandbox: `standard`", "The runtime reads memory that a model may change only once.")
def test_lengths_that_change_while_they_are_read_harm_nobody(attackers: Attackers, level: str) -> None:
    attacker = attackers(level)
    ends = [attacker.tries("protocol.flip_answers", seconds=60.0).word]
    deadline = Deadline(30.0)
    # It is a matter of luck how soon a length changes at the wrong moment.
    while len(ends) < 30 or ("died" not in ends and not deadline.is_over):
        if ends[-1] == "died":
            attacker.tries("protocol.flip_answers", seconds=60.0)
        try:
            ends.append(attacker.tries("kernel.make", name="getpid").word)
        except ValueError:  # its answer is no longer JSON
            ends.append("changed")

    assert set(ends) <= {"done", "changed", "died", "nothing was said"}
    assert ends.count("died") > 0
    attacker.tries("self.crash", how="exit")
    assert attacker.finds("kernel.make", name="getpid") > 0


@pytest.mark.promise(
    "The sandbox: `standard`", "Descriptors that a model sends reach nobody; flags that it sets on its own are its own."
)
def test_descriptors_that_are_sent_reach_nobody(attackers: Attackers, level: str) -> None:
    attacker = attackers(level)
    attacker.finds("kernel.make", name="getpid")
    before = len(os.listdir("/proc/self/fd"))

    sent = attacker.tries("protocol.send_descriptors", count=50)

    # Descriptors in a socket count for all processes of the user, so the model may not even send them.
    assert (sent.refused == "EPERM") if level == "strict" else (sent.done == 50)
    assert attacker.finds("kernel.make", name="getpid") == attacker.pid
    # Threads that inspect processes have files of /proc open for a moment.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.promise("The sandbox: `standard`", "Descriptors that a …")
def test_flags_of_descriptors_are_the_stub_s_own(runtime: moonpool.Runtime, attackers: Attackers, level: str) -> None:
    attackers(level).tries("protocol.change_flags")

    assert answers(runtime)
    assert attackers(level).finds("kernel.make", name="getpid") == attackers(level).pid


def words(text: str) -> NDArray[np.float32]:
    """A megabyte of a text, as numbers."""
    return np.frombuffer((text.encode() * (1 << 20))[: 1 << 20], np.float32)


@pytest.mark.promise(
    "The sandbox: `strict`", "It cannot see memory with requests of another model, also where it may ask that model."
)
def test_another_model_s_requests_are_in_no_memory_that_this_one_sees(
    runtime: moonpool.Runtime, model_folder: Path, level: str
) -> None:
    """At strict not even where it may ask that model, and memory could be lent from one to the other."""
    settings = {} if level == "standard" else {"SANDBOX_MODELS": "sibling"}
    attacker = load_attacker(runtime, level, model_folder, "asking", **settings)
    try:
        runtime.infer("sibling", {"X": words(SECRET)}, timeout_s=60.0)
        assert attacker.finds("protocol.search", backwards=SECRET[::-1]) == 0

        assert attacker.finds("protocol.ask", model="sibling", count=1 << 20) == 1 << 20
        runtime.infer("sibling", {"X": words(SECRET)}, timeout_s=60.0)

        found = attacker.finds("protocol.search", backwards=SECRET[::-1])
        assert found == 0 or level == "standard"
    finally:
        runtime.unload("asking")
