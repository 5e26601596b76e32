"""How many files a server may have open, and how many of them are for clients."""

from __future__ import annotations

import resource

import pytest

from moonpool.runtime.server import descriptors

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limit", "most"), [(1024, 512), (20_000, 10_000), (1 << 20, 16_384), (NO_LIMIT, 16_384)]
)
def test_half_is_left_to_models(monkeypatch: pytest.MonkeyPatch, limit: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))

    assert descriptors.most_connections(16_384) == most


@pytest.mark.parametrize(
    ("limits", "then"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 20), (1 << 16, 1 << 20)),
        ((1024, NO_LIMIT), (1 << 16, NO_LIMIT)),
        ((4096, 4096), None),
        ((1 << 17, 1 << 20), None),
        ((NO_LIMIT, NO_LIMIT), None),
    ],
)
def test_a_limit_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], then: tuple[int, int] | None
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: made.append(wanted))

    descriptors.raise_limit()

    assert made == ([] if then is None else [then])
