"""Tests that a stub ends when one of moonpool's own threads fails."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future

import pytest
from tests.refused_threads import refuse_threads

from moonpool.stub.coroutines import Coroutines

pytestmark = pytest.mark.promise(
    "Chaos",
    "If a thread of moonpool's own fails in a stub, as when memory runs out, the stub ends, and nobody waits for it.",
)


def test_a_process_ends_with_a_thread_that_breaks() -> None:
    program = (
        "import signal; from moonpool.stub import threads;"
        "threads.start(lambda: [].pop(), 'moonpool-test'); signal.pause()"
    )

    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 1
    assert ended.stderr.endswith("IndexError: pop from empty list\n")


def test_coroutines_run_once_there_is_a_thread_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    coroutines = Coroutines(1)
    result: Future[object] = Future()

    async def answer() -> int:
        return 7

    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(RuntimeError, match="new thread"):
            coroutines.start(answer(), lambda *ended: result.set_result(ended))
    coroutines.start(answer(), lambda *ended: result.set_result(ended))

    assert result.result(60.0) == (7, None)
    coroutines.close(30.0)
