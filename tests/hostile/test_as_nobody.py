"""The promises of `strict` again for a user without rights, if root runs the suite.

The promises of `standard` do not depend on the user. That the attempts succeed where nothing stops them is seen once.
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
FILES = sorted(map(str, {*HERE.glob("test_*.py")} - {Path(__file__)}))
# These variables would make the tests write where this user may not, or join them to this run.
OTHERS = ("COV", "PYTEST")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="this user is one without rights")


@pytest.mark.promise("The sandbox: `strict`", "All this holds as root and for a user without rights.")
@pytest.mark.promise(
    "Hostile models",
    "At `strict` every attack of the suite fails, as root and as a user without rights, and "
    "does no harm to the runtime or a sibling.",
)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("on", ["started processes", "spares"])
def test_it_holds_for_a_user_without_rights(on: str) -> None:
    root = HERE.parents[1]
    paths = [str(Path(moonpool.__path__[0]).parent), str(root), *sys.path]
    kept = {name: text for name, text in os.environ.items() if not name.startswith(OTHERS)}
    options = ["-q", "-p", "no:cacheprovider", "-k", "not standard and not without_a_sandbox"]
    if on == "spares":
        options.append("--spares")
    program = [sys.executable, "-m", "pytest", *options, *FILES]
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
