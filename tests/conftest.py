"""What holds for every test."""

from __future__ import annotations

from tests.leaks import _leaves_nothing_behind

__all__ = ["_leaves_nothing_behind"]
