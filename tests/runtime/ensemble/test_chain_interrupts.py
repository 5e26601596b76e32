"""Ensembles whose steps follow one after the other, interrupted anywhere, and with answers that are nonsense."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ensemble_repositories import Io, chain, write_ensemble, write_model
from tests.inside import hosted_in
from tests.runtime.interrupting import interrupted_everywhere
from tests.runtime.recorder import Recorder
from tests.waiting import wait_until

import moonpool
from moonpool import ModelInstance, Response
from moonpool.runtime.model.request import InferenceRequest

X = np.array([2, 5, 6], np.float32)
TIMEOUT_S = 60.0
# An instance that is interrupted while it takes a batch or gives an answer counts as lost.
PATIENT = """
parameters [{ key: "MOONPOOL_MAX_RESTARTS" value { string_value: "1000" } },
            { key: "MOONPOOL_RESTART_BACKOFF_S" value { string_value: "0" } }]
"""


def is_clean(runtime: moonpool.Runtime, ensemble: str, *members: str) -> bool:
    """Return True if no request is inside, and each model has its instance."""
    schedulers = [hosted_in(runtime, name).scheduler for name in members]
    is_idle = not any(each.executing or each.queued for each in schedulers)
    return (
        is_idle
        and all(runtime.is_ready(name) for name in members)
        and not hosted_in(runtime, ensemble).scheduler.in_flight
    )


@pytest.mark.promise(
    "Ensembles",
    "A signal handler may raise anywhere in a request to an ensemble. The caller gets its exception, and all models "
    "stay usable.",
)
# An output of a step ends inside, perhaps with the exception.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("timeout_s", [None, TIMEOUT_S])
@pytest.mark.parametrize("way", ["no process", "stubs"])
def test_an_interrupt_at_any_call_leaves_usable_models_behind(
    tmp_path: Path, way: str, timeout_s: float | None
) -> None:
    backend = Recorder()
    backend.blocks = False
    for name in ("first", "second"):
        write_model(tmp_path, name, more=PATIENT)
        if way == "no process":
            use_recorder(tmp_path / name)
    write_ensemble(tmp_path, "both", chain(["first", "second"]))
    wanted = X + 2 if way == "stubs" else X
    kept: list[object] = []
    with moonpool.Runtime(tmp_path, backends=[backend]) as runtime:

        def check() -> None:
            outputs = runtime.infer("both", {"A": X}, timeout_s=TIMEOUT_S)
            assert outputs["B"].tolist() == wanted.tolist()
            wait_until(lambda: is_clean(runtime, "both", "first", "second"), TIMEOUT_S)

        check()
        # Outputs that ended inside would end with the exception, too.
        count = interrupted_everywhere(lambda: kept.append(runtime.infer("both", {"A": X}, timeout_s=timeout_s)), check)
        assert count > 20
        kept.clear()


def use_recorder(model: Path) -> None:
    """Give a model that was written to the backend without processes."""
    config = model / "config.pbtxt"
    config.write_text(config.read_text().replace('"python"', '"recorder"'))


def nonsense(made: object) -> Callable[[ModelInstance, Sequence[InferenceRequest]], Any]:
    """Answer every request of the model `broken` with `made` in place of its outputs, and others with their input."""

    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> list[Response]:
        if instance.model.name == "broken":
            return [Response(made) for _ in requests]  # type: ignore[arg-type]
        return [Response({"Y": request.inputs[0].data.copy()}) for request in requests]

    return execute


@pytest.mark.promise(
    "Ensembles",
    "What a backend answers may be nonsense: the request gets an error, and no request of an ensemble stays open.",
)
@pytest.mark.parametrize("made", [7, [1, 2], {"Y": "text"}, {"Y": object()}], ids=["number", "list", "text", "object"])
@pytest.mark.parametrize("form", ["chain", "graph"])
def test_nonsense_of_a_backend_ends_the_request(tmp_path: Path, made: object, form: str) -> None:
    for name in ("plain", "broken"):
        write_model(tmp_path, name)
        use_recorder(tmp_path / name)
    steps = chain(["plain", "broken", "plain"])
    outputs: tuple[Io, ...] = (Io("B"),)
    if form == "graph":
        steps += chain(["plain"], "A", "C")
        outputs = (Io("B"), Io("C"))
    write_ensemble(tmp_path, "mad", steps, outputs=outputs)
    backend = Recorder(execute=nonsense(made))
    backend.blocks = False
    with moonpool.Runtime(tmp_path, backends=[backend]) as runtime:
        for _ in range(3):
            with pytest.raises(Exception, match=r".") as raised:
                runtime.infer("mad", {"A": X}, timeout_s=TIMEOUT_S)
            assert not isinstance(raised.value, moonpool.RequestTimedOut), raised.value
            future = runtime.submit("mad", {"A": X})
            assert future.exception(TIMEOUT_S) is not None
        wait_until(lambda: is_clean(runtime, "mad", "plain", "broken"), TIMEOUT_S)


def test_a_member_that_is_replaced_is_found_by_the_next_step(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        write_model(tmp_path, name)
    write_ensemble(tmp_path, "three", chain(["first", "second", "third"]))
    with moonpool.Runtime(tmp_path) as runtime:
        assert runtime.infer("three", {"A": X})["B"].tolist() == [5, 8, 9]
        again = tmp_path / "second" / "1" / "model.py"
        again.write_text(again.read_text().replace("x + 1", "x + 10"))
        runtime.load("second")
        assert runtime.infer("three", {"A": X})["B"].tolist() == [14, 17, 18]
        assert is_clean(runtime, "three", "first", "second", "third")


def test_requests_to_a_chain_leave_no_objects_behind(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_model(tmp_path, name)
    write_ensemble(tmp_path, "both", chain(["first", "second"]))
    with moonpool.Runtime(tmp_path) as runtime:

        def ask(count: int) -> None:
            for _ in range(count):
                runtime.infer("both", {"A": X})

        ask(500)
        # Anything that was left behind by each request would be there a thousand times.
        gc.collect()
        before, constants = sys.getallocatedblocks(), (None, True, False, 0, "", np.dtype("f4"))
        counts = [sys.getrefcount(each) for each in constants]
        ask(2000)
        after = [sys.getrefcount(each) for each in constants]
        gc.collect()
        assert sys.getallocatedblocks() - before < 1000
        assert all(abs(one - other) < 1000 for one, other in zip(counts, after, strict=True))
