"""The fuzz targets withstand the whole corpus, and inputs close to it.

`python -m tests.fuzz.run` looks for more with atheris, which sees what code an input reaches.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz.targets import TARGETS

pytestmark = [
    pytest.mark.promise(
        "What a stub says",
        "Whatever bytes a stub's messages, layouts, calls, metrics and texts contain, or "
        "requests and configurations, the runtime raises only the documented errors.",
    ),
    pytest.mark.promise("Environments", "A malicious archive is refused, and …"),
]

CORPUS = Path(__file__).parent / "corpus"
KNOWN = {name: sorted((CORPUS / name).iterdir()) for name in sorted(TARGETS)}
EVERY_TARGET = pytest.mark.parametrize("name", sorted(TARGETS))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Turn the log off, since nobody reads so many lines."""
    caplog.set_level(logging.CRITICAL + 1, "moonpool")
    caplog.set_level(logging.CRITICAL + 1, "moonpool.stub")


def near(name: str) -> st.SearchStrategy[bytes]:
    """Make bytes: known ones, changed in some places, cut or joined with others, or any bytes."""
    known = st.sampled_from([path.read_bytes() for path in KNOWN[name]])
    change = st.tuples(st.integers(0, 400), st.integers(0, 255))

    def changed(data: bytes, changes: list[tuple[int, int]], begin: int, more: bytes) -> bytes:
        made = bytearray(data)
        for place, value in changes:
            if place < len(made):
                made[place] = value
        return bytes(made[:begin] + more + made[begin:])

    changes = st.lists(change, max_size=4)
    mutated = st.builds(changed, known, changes, st.integers(0, 400), st.binary(max_size=8))
    return mutated | st.binary(max_size=200)


@EVERY_TARGET
def test_known_inputs_do_no_harm(name: str) -> None:
    assert KNOWN[name]
    for path in KNOWN[name]:
        TARGETS[name](path.read_bytes())


@EVERY_TARGET
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_variants_of_known_inputs_do_no_harm(name: str, data: st.DataObject) -> None:
    TARGETS[name](data.draw(near(name)))


def test_every_corpus_has_its_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
