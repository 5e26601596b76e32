"""Everything here once more for a user without rights, where the suite is run by root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hostile import as_nobody

import moonpool

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_*.py") if path.name != Path(__file__).name)
# What would have it write where it may not, or take it for a part of this run.
OTHERS = ("COV", "PYTEST", "TMPDIR", "HOME")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="this user is one without rights")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", FILES)
def test_it_holds_for_a_user_without_rights(tmp_path: Path, file: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, as_nobody.NOBODY, as_nobody.NOBODY)
    root = HERE.parents[1]
    packages = [str(Path(each).parent) for each in moonpool.__path__]
    needed = [sys.prefix, sys.base_prefix, str(root), str(home), *packages, *filter(None, sys.path)]
    kept = {name: text for name, text in os.environ.items() if not name.startswith(OTHERS)}
    environment = kept | {
        "HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join([*packages, *filter(None, sys.path)]),
    }
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [
            *(sys.executable, as_nobody.__file__, *needed, "--"),
            *(*pytest_command, f"--rootdir={root}", str(HERE / file)),
        ],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    if ended.returncode != 0:
        pytest.fail(ended.stdout, pytrace=False)
    assert " passed" in ended.stdout
