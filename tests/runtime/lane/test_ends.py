"""A program may end at any time, also while daemon threads are inside what is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
from tests.other_pythons import made
from tests.runtime.lane.built import skip_without_compiled

import moonpool

PROGRAM = Path(__file__).with_name("ends.py")
SOURCE = str(Path(next(iter(moonpool.__path__))).parent)
# Those that use what is compiled.
PYTHONS = [sys.executable, *(f"{path}/bin/python" for path in made() if int(path.name.split(".")[1]) >= 11)]


@pytest.mark.promise(
    "Lifecycle", "A program may end, and its threads with it, while requests are under way: its exit code is its own."
)
@pytest.mark.parametrize("python", PYTHONS)
def test_a_program_ends_though_threads_of_it_are_inside_what_is_compiled(tmp_path: Path, python: str) -> None:
    skip_without_compiled()
    # The environments of models have numpy alone.
    (tmp_path / "msgpack").symlink_to(Path(msgpack.__file__).parent)
    for _ in range(2):
        ended = subprocess.run(
            [python, str(PROGRAM)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((SOURCE, str(tmp_path)))},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
