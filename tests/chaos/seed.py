"""The options of chaos: `--chaos-seed` and `--chaos-seconds`."""

from __future__ import annotations

import os

import pytest


def add_options(parser: pytest.Parser) -> None:
    chaos = parser.getgroup("chaos", "harm at random (tests/chaos)")
    chaos.addoption("--chaos-seed", type=int, help="what is done to whom; another one every time")
    chaos.addoption("--chaos-seconds", type=float, default=5.0, help="for each test; %(default)g")


def draw(config: pytest.Config) -> None:
    """Choose a seed once for all processes of a run, which get their options from the first one."""
    if config.option.chaos_seed is None:
        config.option.chaos_seed = int.from_bytes(os.urandom(4), "big")


def header(config: pytest.Config) -> str:
    return f"chaos: --chaos-seed={config.option.chaos_seed}"
