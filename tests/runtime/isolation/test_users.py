"""Numbers of private users, which no other runtime on the machine takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.cli.shell import environment

from moonpool.runtime.isolation import users

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives its children users")

# The program takes two users, prints them, and keeps them until its input ends.
_OTHER = """
import sys
from moonpool.runtime.isolation import users
users._FILE = sys.argv[1]
print(users.take(), users.take(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The file of the locks. No runtime beside these tests takes its numbers there."""
    monkeypatch.setattr(users, "_FILE", str(tmp_path / "users"))
    return str(tmp_path / "users")


def test_each_is_somebody_else() -> None:
    taken = [users.take() for _ in range(20)]
    try:
        assert len(set(taken)) == 20
        assert all(users.FIRST <= (user or 0) <= users.LAST for user in taken)
    finally:
        for user in taken:
            users.give_back(user or 0)


def test_one_that_was_given_back_is_given_again() -> None:
    first = users.take()
    users.give_back(first or 0)
    users.give_back(first or 0)
    second = users.take()
    users.give_back(second or 0)

    assert first == second


def test_two_runtimes_never_share_one(file: str) -> None:
    own = users.take()
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER, file],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        try:
            others = set(map(int, ((other.stdout and other.stdout.readline()) or "").split()))
            mine = [users.take() for _ in range(3)]
            for user in mine:
                users.give_back(user or 0)
            assert len(others) == 2
            assert others.isdisjoint({own, *mine})
            other.kill()
            other.wait()
            # The end of the process released its locks.
            assert others & set(_take_and_give_back(4))
        finally:
            other.kill()
            users.give_back(own or 0)


def _take_and_give_back(count: int) -> list[int]:
    taken = [users.take() or 0 for _ in range(count)]
    for user in taken:
        users.give_back(user)
    return taken
