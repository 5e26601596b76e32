"""That what hypothesis tries is the same in every run, however long it takes: a busy machine makes no test fail."""

from __future__ import annotations

import pytest


def load(config: pytest.Config) -> None:
    """For all tests; `--hypothesis-profile=default` has it look for more."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # a machine with a device may lack it, and runs no such test
        return
    settings.register_profile(
        "moonpool", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    if config.getoption("--hypothesis-profile", None) is None:
        settings.load_profile("moonpool")
