"""The native codec takes and refuses what Python's does, whatever the bytes are."""

from __future__ import annotations

import random
from collections import Counter

import msgpack
import pytest
from tests.runtime.triton.both_codecs import LAYOUTS, agree, corpus, layouts_of_batches, vectors
from tests.runtime.triton.codec_program import Asked, CodecProgram
from tests.vectors.make import CHANNELS, plain, reason

from moonpool.ipc.codec import encode, work_codec
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import NO_CORE, Kind, Side

pytestmark = pytest.mark.timeout(300)  # a compiler runs before the first one


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> CodecProgram:
    return CodecProgram(tmp_path_factory.mktemp("codec"))


@pytest.mark.promise(
    "The wire",
    "The native codec accepts, reads, writes and refuses the same packets as Python's, with the "
    "same error texts, whatever the bytes are. It never reads beyond them.",
)
@pytest.mark.parametrize("channel", CHANNELS)
def test_every_vector_is_read_as_python_reads_it(program: CodecProgram, channel: str) -> None:
    known = vectors(channel)
    told = program.tell([asked for asked, _ in known])

    for (asked, vector), (refused, again) in zip(known, told, strict=True):
        assert reason(refused) == vector.get("refused", ""), asked
        if not refused:
            fields = msgpack.unpackb(again, strict_map_key=True)
            assert plain(fields) == vector["says"]
            assert again == encode(*fields)


def changed(packet: bytes, others: list[bytes], dice: random.Random) -> bytes:
    """The packet with some bytes changed, taken away, or put in from another one."""
    made = bytearray(packet)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        at = dice.randrange(len(made) + 1)
        how = dice.randrange(5)
        if how == 0 and at < len(made):
            made[at] = dice.randrange(256)
        elif how == 1 and at < len(made):
            made[at] ^= 1 << dice.randrange(8)
        elif how == 2:
            del made[at : at + dice.randrange(4)]
        elif how == 3:
            # The bytes are replaced by any value.
            made[at : at + dice.randrange(3)] = msgpack.packb(dice.choice(_VALUES))
        else:
            other = dice.choice(others)
            begin = dice.randrange(len(other) + 1)
            made[at:at] = other[begin : begin + dice.randrange(12)]
    return bytes(made)


_VALUES = [None, True, 0, -1, 127, 2**31, 2**63, 2**64 - 1, 0.5, "", "ß" * 40, b"\xff", [], [0], {"a": 1}]


@pytest.mark.promise("The wire", "The native codec accepts, reads …")
@pytest.mark.parametrize("channel", CHANNELS)
def test_both_codecs_refuse_the_same_of_changed_packets(program: CodecProgram, channel: str) -> None:
    dice = random.Random(f"seven {channel}")
    known = [asked for asked, vector in vectors(channel)]
    good = [asked for asked, vector in vectors(channel) if "says" in vector]
    packets = [asked.packet for asked in known if asked.packet]
    asked = [
        picked._replace(packet=changed(picked.packet, packets, dice))
        for picked in (dice.choice(dice.choice([known, good, good])) for _ in range(20_000))
    ]

    accepted = sum(map(agree, asked, program.tell(asked)))
    assert accepted > 2000


@pytest.mark.promise("The wire", "The native codec accepts, reads …")
def test_both_codecs_agree_on_what_a_fuzzer_found(program: CodecProgram) -> None:
    found = corpus()
    assert 0 < sum(map(agree, found, program.tell(found))) < len(found)


@pytest.mark.promise("The wire", "The native codec accepts, reads …")
def test_layouts_are_read_alike_however_many_values_they_may_have(program: CodecProgram) -> None:
    dice = random.Random("layouts")
    asked = [
        Asked("layout", dice.choice([0, 0, 1, 8, 9, 10, 255]), packet)
        for packet in LAYOUTS + [changed(dice.choice(LAYOUTS), LAYOUTS, dice) for _ in range(20_000)]
    ]

    accepted = sum(map(agree, asked, program.tell(asked)))
    assert accepted > 200


@pytest.mark.promise(
    "The wire",
    "Both ends of a stub lay out the same batches in the same way, accept the same answers, and "
    "refuse all others with the same words.",
)
def test_both_ends_place_inputs_and_read_answers_alike(program: CodecProgram) -> None:
    dice = random.Random("batches")
    known = layouts_of_batches()
    packets = [each.packet for each in known]
    asked = known + [
        picked._replace(
            packet=changed(picked.packet, packets, dice), sender=dice.choice([picked.sender] * 7 + [dice.randrange(4)])
        )
        for picked in (dice.choice(known) for _ in range(20_000))
    ]

    accepted = Counter(each.channel for each, told in zip(asked, program.tell(asked), strict=True) if agree(each, told))
    assert min(accepted[channel] for channel in ("answer", "place", "strings")) > 200


def test_a_message_has_no_more_values_than_any_honest_one(program: CodecProgram) -> None:
    most = encode(Kind.ANSWER, 0, NO_CORE, [], [], [[1, 2, 3]] * 131_072, b"", None, None)
    more = encode(Kind.ANSWER, 0, NO_CORE, [[1, 2]] * (1 << 20), [], [], b"", None, None)

    told = program.tell([Asked("work", Side.STUB, packet) for packet in (most, more)])

    assert [refused for refused, _ in told] == ["", "a packet of more values than any message has"]
    assert told[0].again == most
    with pytest.raises(RemoteProtocolError, match=told[1].refused):
        work_codec(Side.RUNTIME).decode_stored(more)
