"""Ensembles as steps of ensembles: a request may not become more requests than the limit, nor ensembles lie too
deep.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.ensemble_repositories import ADDS, REPEATS, Io, chain, ensemble_text, step, write_ensemble, write_model

import moonpool
from moonpool.runtime.errors import BacklogFull

pytestmark = pytest.mark.promise(
    "Ensembles",
    "A request to an ensemble becomes at most `ensemble_requests` requests, with those of ensembles among its steps, "
    "and ensembles nest at most 16 deep. A load that would break this is refused, also that of a model inside.",
)

X = np.array([8, 5, 6], np.float32)
DECOUPLED = "model_transaction_policy { decoupled: true }"
LIMIT = 'parameters { key: "MOONPOOL_BACKLOG_BYTES" value { string_value: "128K" } }'
# Waits while the file HELD lies beside it.
HOLDS = ADDS.replace("import triton", "import os, time\nimport triton").replace(
    "    def execute(self, requests):\n",
    "    def execute(self, requests):\n"
    "        while os.path.exists(os.path.join(os.path.dirname(__file__), 'HELD')):\n"
    "            time.sleep(0.002)\n",
)


def through(names: list[str]) -> list[str]:
    """Return steps of ensembles with one input A and one output B, one after the other."""
    between = ["A", *(f"t{number}" for number in range(1, len(names))), "B"]
    return [step(name, {"A": between[number]}, {"B": between[number + 1]}) for number, name in enumerate(names)]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[moonpool.Runtime]:
    write_model(tmp_path, "adds")
    with moonpool.Runtime(tmp_path, config_limits=["ensemble_requests=40"]) as runtime:
        yield runtime


def test_requests_of_ensembles_in_ensembles_have_a_limit_together(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    write_ensemble(tmp_path, "ten", chain(["adds"] * 10))
    write_ensemble(tmp_path, "three", through(["ten"] * 3))
    write_ensemble(tmp_path, "four", through(["ten"] * 4))
    text = "a request to ensemble 'four' becomes 44 requests .* 40 is the most; an operator raises it by .*ensemble_requests=NUMBER"
    with pytest.raises(moonpool.LoadFailed, match=text):
        runtime.load("four")
    runtime.load("three")
    assert runtime.infer("three", {"A": X})["B"].tolist() == (X + 30).tolist()
    # An ensemble inside may not grow either. What there is goes on.
    (tmp_path / "ten" / "config.pbtxt").write_text(ensemble_text(chain(["adds"] * 20)))
    with pytest.raises(moonpool.LoadFailed, match="ensemble 'three' becomes 63 requests"):
        runtime.load("ten")
    assert runtime.infer("three", {"A": X})["B"].tolist() == (X + 30).tolist()


def test_ensembles_nest_only_so_deep(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    write_ensemble(tmp_path, "e1", chain(["adds"]))
    for number in range(2, 401):
        write_ensemble(tmp_path, f"e{number}", through([f"e{number - 1}"]))
    runtime.load("e16")
    assert runtime.infer("e16", {"A": X})["B"].tolist() == (X + 1).tolist()
    for name in ("e17", "e400"):
        with pytest.raises(moonpool.LoadFailed, match=f"nested more than 16 deep in '{name}'"):
            runtime.load(name)
    # Nor may the model at the bottom become one.
    write_model(tmp_path, "below")
    below = step("below", {"X": "X"}, {"Y": "Y"})
    (tmp_path / "adds" / "config.pbtxt").write_text(ensemble_text([below]).replace('"A"', '"X"').replace('"B"', '"Y"'))
    with pytest.raises(moonpool.LoadFailed, match="nested more than 16 deep in 'e16'"):
        runtime.load("adds")
    assert runtime.infer("e16", {"A": X})["B"].tolist() == (X + 1).tolist()


@pytest.mark.promise(
    "Limits",
    "A response that waits before a step which is an ensemble counts as all requests that it may have open there at a "
    "time.",
)
def test_a_response_counts_as_what_becomes_of_it(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    write_model(tmp_path, "repeats", REPEATS, more=DECOUPLED)
    write_model(tmp_path, "holds", HOLDS)
    names = ["B", *(f"C{number}" for number in range(9))]
    outputs = [Io(name) for name in names]
    wide = [step("adds" if n else "holds", {"X": "A"}, {"Y": name}) for n, name in enumerate(names)]
    write_ensemble(tmp_path, "ten", wide, outputs=outputs)
    steps = [*chain(["repeats"], last="t"), step("ten", {"A": "t"}, {name: name for name in names})]
    write_ensemble(tmp_path, "outer", steps, outputs=outputs, more=LIMIT)
    held = tmp_path / "holds" / "1" / "HELD"
    held.touch()
    runtime.load("outer")
    # Eight alone would not be too many.
    with pytest.raises(BacklogFull, match="MOONPOOL_BACKLOG_BYTES of model 'outer'"):
        list(runtime.stream("outer", {"A": X}, timeout_s=20.0))
    held.unlink()
