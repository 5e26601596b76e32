"""Settings of hypothesis: every run tries the same examples, and a busy machine fails no test for its time."""

from __future__ import annotations

import pytest


def load(config: pytest.Config) -> None:
    """Load the profile of this suite; `--hypothesis-profile=default` tries more examples."""
    if config.option.markexpr == "gpu":
        return  # no test for a card uses it, and to import it takes half of the time until the first one begins
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # a machine with a card may lack it, and runs no such test
        return
    settings.register_profile("moonpool", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    if config.getoption("--hypothesis-profile", None) is None:
        settings.load_profile("moonpool")
