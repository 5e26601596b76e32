"""Ensembles in ensembles: Triton bounds neither their depth nor what they multiply to, and moonpool does."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ensemble_repositories import chain, step, write_ensemble, write_model
from tests.triton.answers import Answer, Failure
from tests.triton.core.conftest import Core

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]
DEEPEST = 16


@pytest.mark.promise(
    "Fidelity",
    "Ensembles nest at most 16 deep and become 4096 requests at most, where Triton has no bound; the error says so.",
)
def test_ensembles_in_ensembles_have_bounds(core: Core) -> None:
    write_model(core.repository, "base")
    write_ensemble(core.repository, "deep1", chain(["base"]))
    for number in range(2, DEEPEST + 2):
        inner = step(f"deep{number - 1}", {"A": "A"}, {"B": "B"})
        write_ensemble(core.repository, f"deep{number}", [inner])
    write_ensemble(core.repository, "wide1", chain(["base"] * 70))
    tensors = ["A", *(f"t{number}" for number in range(1, 70)), "B"]
    steps = [step("wide1", {"A": tensors[n]}, {"B": tensors[n + 1]}) for n in range(70)]
    write_ensemble(core.repository, "wide2", steps)
    for name, added in ((f"deep{DEEPEST + 1}", 1), ("wide2", 4900)):
        assert core.triton.load(name) is None
        answer = core.triton.infer(name, {"A": np.zeros(3, np.float32)})
        assert isinstance(answer, Answer)
        assert answer.outputs["B"].data == np.full(3, added, np.float32).tobytes()
    deep = core.moonpool.load(f"deep{DEEPEST + 1}")
    wide = core.moonpool.load("wide2")
    assert isinstance(deep, Failure)
    assert "nested more than 16 deep" in deep.text
    assert isinstance(wide, Failure)
    assert "becomes 4970 requests" in wide.text
