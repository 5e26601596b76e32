"""What `strict` promises once more for a user without rights, where the suite is run by root.

What `standard` promises has nothing to do with who the user is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import as_nobody

import moonpool

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_*.py") if path.name != Path(__file__).name)
# What would make it write where it may not, or take it for a part of this run.
OTHERS = ("COV", "PYTEST")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="this user is one without rights")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", FILES)
def test_it_holds_for_a_user_without_rights(file: str) -> None:
    root = HERE.parents[1]
    paths = [str(Path(moonpool.__path__[0]).parent), str(root), *sys.path]
    kept = {name: text for name, text in os.environ.items() if not name.startswith(OTHERS)}
    options = ["-q", "-p", "no:cacheprovider", "-k", "not standard"]
    program = [sys.executable, "-m", "pytest", *options, str(HERE / file)]
    ended = subprocess.run(
        as_nobody.command(program),
        cwd=root,
        env=kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    if "in become_nobody" in ended.stdout and "not permitted" in ended.stdout:
        pytest.skip("this root may not make mounts, which hide what is closed to others")
    if ended.returncode != 0:
        pytest.fail(ended.stdout, pytrace=False)
    assert " passed" in ended.stdout
