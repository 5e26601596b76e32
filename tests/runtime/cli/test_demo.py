"""`moonpool demo`: it comes to its end and says what it found."""

from __future__ import annotations

import re

from tests.runtime.cli.shell import CommandLine

from moonpool.runtime.cli.demo import PingPong, verdict


def test_the_demo_walks_through_all_parts(cli: CommandLine) -> None:
    ended = cli("demo", "--seconds", "0.1")

    assert ended.returncode == 0
    assert ended.stderr == ""
    assert re.findall(r"^(\d)\. ", ended.stdout, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    for expected in (
        r"OUTPUT0 +11 +22 +33 +44",
        r"one instance, two callers +[0-9,]+  requests/s",
        r"two instances, two callers +[0-9,]+  requests/s",
        r"the caller got StubDied after +[0-9.,]+ ms",
        r"answered, by a new process, after +[0-9.,]+ ms",
        r"add_sub meanwhile: failed +0\n",
        r"the caller got ExecuteTimedOut after +[0-9.,]+ ms",
        r"a bare packet to another process and back +[0-9.,]+  µs",
        r"checked, batched, executed, answered +[0-9.,]+  µs",
    ):
        assert re.search(expected, ended.stdout), expected
    # Commands after that may be longer, because their paths are.
    told = ended.stdout.partition("Next")[0]
    assert [line for line in told.splitlines() if len(line) > 100] == []


def test_on_one_core_nobody_is_told_that_two_instances_are_faster() -> None:
    assert "one core" in verdict(1.0, 1)


def test_a_gain_that_did_not_come_is_admitted() -> None:
    assert "only 1.10 times" in verdict(1.1, 4)
    assert verdict(1.9, 4) == "Two instances did 1.90 times the work of one."


def test_the_other_end_of_a_ping_pong_ends_with_it() -> None:
    with PingPong(100) as ping_pong:
        for _ in range(10):
            ping_pong()
