"""The native side's tables are those of the code."""

from __future__ import annotations

import re

import pytest
from tests.runtime.triton import library

from moonpool.runtime.triton.wire_header import HEADER, header

pytestmark = pytest.mark.promise("Containment", "The runtime and the library …")


@pytest.mark.promise(
    "The wire", "The native library in tritonserver has the same messages, bounds and numbers as Python."
)
def test_the_header_of_the_wire_is_current() -> None:
    written = HEADER.read_text(encoding="utf-8")

    assert written == header(), "run python -m moonpool.runtime.triton.wire_header"


# These numbers belong to the library alone: times of its own threads, and limits of its own calls. `wire.h` or the
# compiler checks the first ones against Python's.
ITS_OWN = {
    "kMaxValues",
    "kMaxDescriptors",
    "kMaxShownName",
    "kLarge",
    "kDetails",
    "kManyMessages",
    "kMostLastMessages",
    "kKeepMilliseconds",
    "kLookMilliseconds",
    "kGreetingMilliseconds",
    "kEndMilliseconds",
    "kBytes",
    "kKnown",
    "kMostDenialsLogged",
    # Of copies that go past the caches.
    "kPastCaches",
    "kAhead",
    # Of the port of calls, which leaves more of them to Python.
    "kMostTensors",
    # Of a work channel in memory, which the library does not use.
    "kSlotPage",
    "kAnnouncedBytes",
    "kAnnouncedNs",
    "kMostRings",
    "kSliceNs",
    "kBellBytes",
    "kLooksPerTime",
    "kWakeUpsNs",
    "kCountNs",
    "kFewestRests",
    "kMostRests",
}


def test_the_library_has_few_numbers_of_its_own() -> None:
    found = set()
    for path in sorted((*HEADER.parent.glob("*.[hc]*"), *library.NATIVE.glob("*.[hc]*"))):
        if path != HEADER:
            numbers = r"constexpr [\w:]+ (k\w+) = [^;]*?\b(\d{2,}|\d+'\d|1 <<)[^;]*;"
            text = path.read_text(encoding="utf-8")
            found |= {match[1] for match in re.finditer(numbers, text)}

    assert found <= ITS_OWN, "put it into runtime/model/budgets.py or ipc/messages.py"
