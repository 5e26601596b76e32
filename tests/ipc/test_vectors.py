"""The packets in tests/vectors say what they always said."""

from __future__ import annotations

import json

import pytest
from tests.vectors.make import CHANNELS, FOLDER, read, text

EVERY_CHANNEL = pytest.mark.parametrize("channel", CHANNELS)


@pytest.mark.promise("The wire", "A packet keeps the meaning that it had when the protocol's version was made.")
@EVERY_CHANNEL
def test_every_packet_is_read_as_it_was_when_the_vectors_were_made(channel: str) -> None:
    _, sides = CHANNELS[channel]
    vectors = json.loads((FOLDER / f"{channel}.json").read_text(encoding="utf-8"))

    assert [read(channel, sides[vector["from"]], bytes.fromhex(vector["packet"])) for vector in vectors] == vectors


@EVERY_CHANNEL
def test_there_are_vectors_for_all_of_the_table(channel: str) -> None:
    written = (FOLDER / f"{channel}.json").read_text(encoding="utf-8")

    assert written == text(channel), "run python -m tests.vectors.make"
