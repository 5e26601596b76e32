"""The quick forms raise or decline for objects that they do not know or that are half made, and the process lives."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.quick.built import skip_without_forms

import moonpool

PROGRAM = Path(__file__).with_name("strangers.py")
SOURCE = str(Path(next(iter(moonpool.__path__))).parent)


# With a negative number, no class was taught.
@pytest.mark.parametrize("count", [3000, -300])
def test_forms_bear_objects_that_they_do_not_know(count: int) -> None:
    skip_without_forms()
    seed = random.randrange(1 << 32)
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(count), str(seed)],
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONMALLOC": "debug"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )

    assert ended.returncode == 0, f"seed {seed}:\n{ended.stderr[-3000:]}"
    raised, returned = map(int, ended.stdout.split())
    assert raised
    assert returned
