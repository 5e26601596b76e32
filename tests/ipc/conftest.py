"""Fixtures for tests of channels and messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgpack import fallback
from tests.gpu.cards import card, fake, fake_library, gpu

from moonpool.ipc import codec
from moonpool.ipc.channel import Channel

__all__ = ["_either_msgpack", "card", "ends", "fake", "fake_library", "gpu"]

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


@pytest.fixture(scope="module", params=["in C", "in Python"])
def _either_msgpack(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything is tried on both forms of msgpack: a model's environment may have either."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in Python":
            patch.setattr(codec, "unpack", fallback.unpackb)
            patch.setattr(codec, "pack", lambda message: fallback.Packer().pack(message))
        yield
