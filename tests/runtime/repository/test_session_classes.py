"""Classes that were typed into IPython, as in a notebook, are hosted from their source."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import moonpool
from moonpool.runtime.repository.session_source import source_of

SOURCE = Path(moonpool.__path__[0]).parent
IMPORTS = "import numpy as np\nfrom moonpool import Batch, Float32"
SCALE = """
class Scale:
    def __call__(self, X: Float32[Batch, 3]) -> Float32[Batch, 3]:
        return np.multiply(X, FACTOR)
"""
ASK = """
import moonpool
with moonpool.Runtime() as runtime:
    runtime.load("m", Scale{options})
    print("ANSWER", runtime.infer("m", {{"X": np.ones((1, 3), np.float32)}})["OUTPUT0"].tolist())
"""
# The program runs cells as a notebook's kernel does, and ends with the first one that fails.
_SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_line_magic("colors", "NoColor")
for cell in json.load(sys.stdin):
    if not shell.run_cell(cell, store_history=True).success:
        break
"""

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("IPython"), reason="IPython is not installed")


def run(folder: Path, *cells: str) -> str:
    """Run cells, and return all that they print, errors included."""
    ended = subprocess.run(
        [sys.executable, "-c", _SHELL],
        input=json.dumps(cells),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "IPYTHONDIR": str(folder / "ipython")},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    return ended.stdout + ended.stderr


def ask(options: str = "") -> str:
    return ASK.format(options=options)


@pytest.mark.promise("The package", "A class of a notebook's cell …")
def test_a_class_in_a_cell_is_hosted_with_what_it_uses(tmp_path: Path) -> None:
    helper = "def twice(x):\n    return x * len([x, x])"
    base = "class Base:\n    def scaled(self, X):\n        return twice(X) * SIZES['one'] / os.path.sep.count('/')"
    model = """
    class Scale(Base):
        rows: "Rows"

        def __call__(self, X: "Rows") -> Rows:
            return self.scaled(X)
    """
    text = run(
        tmp_path,
        f"{IMPORTS}\nimport os, os.path",
        "class Scale: ...",  # an earlier class of the name
        "%time unrelated = print('unrelated')",
        "SIZES = {'one': 1}\nRows = Float32[Batch, 3]",
        helper,
        base,
        "\n".join(line[4:] for line in model.splitlines()),
        ask(),
    )
    assert "ANSWER [[2.0, 2.0, 2.0]]" in text, text


@pytest.mark.parametrize("level", ["standard", "strict"])
def test_it_is_hosted_at_every_level(tmp_path: Path, level: str) -> None:
    option = f', config={{"parameters": {{"MOONPOOL_SANDBOX": {{"string_value": "{level}"}}}}}}'
    text = run(tmp_path, IMPORTS, "FACTOR = 3", SCALE, ask(option))

    assert "ANSWER [[3.0, 3.0, 3.0]]" in text, text


def test_a_class_that_was_changed_replaces_the_one_before(tmp_path: Path) -> None:
    load = 'runtime.load("m", Scale); print("ANSWER", runtime.infer("m", x)["OUTPUT0"].tolist())'
    text = run(
        tmp_path,
        f"{IMPORTS}\nimport moonpool\nx = {{'X': np.ones((1, 3), np.float32)}}",
        "FACTOR = 3\nruntime = moonpool.Runtime()",
        SCALE,
        f"{load}\n{load}",
        "FACTOR = 4",
        load,
        "runtime.close()",
    )

    assert text.count("ANSWER [[3.0, 3.0, 3.0]]") == 2, text
    assert text.count("ANSWER [[4.0, 4.0, 4.0]]") == 1


@pytest.mark.promise(
    "The package",
    "A class of a notebook's cell is hosted, with everything that it uses from the notebook, at "
    "its values there. If that is impossible, the error shows the two lines that help.",
)
@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("FACTOR = np.float32(2)", "it uses 'FACTOR', whose value is the result of running code"),
        ("FACTOR = 2\nFACTOR += 1", "it uses 'FACTOR', whose value is the result of running code"),
        ("for FACTOR in [1, 2]: pass", "it uses 'FACTOR', whose value is the result of running code"),
        ("FACTOR = [1, 2, 3]\nFACTOR.append(4)", "it uses 'FACTOR', which was changed after"),
        ("ONE = 1\nFACTOR = [ONE, 2, 3]\nFACTOR.append(4)", "it uses 'FACTOR', which was changed after"),
        ("ONE = 1\nFACTOR = {1: [ONE]}\nFACTOR[1][0] = 4", "it uses 'FACTOR', which was changed after"),
        ("ONE = 1\nFACTOR = {**{}, 1: ONE}\nFACTOR[2] = 4", "it uses 'FACTOR', which was changed after"),
        ("ONE = 1\nFACTOR = [ONE] + [2]\nFACTOR[0] = 4", "it uses 'FACTOR', which was changed after"),
        ("class FACTOR: n = 1\nFACTOR.n = 2", "it uses 'FACTOR', whose value is the result of running code"),
        ("globals()['FACTOR'] = 2", "it uses 'FACTOR', which nothing that was typed defines"),
    ],
)
def test_a_value_that_cannot_be_copied_is_named(monkeypatch: pytest.MonkeyPatch, cell: str, why: str) -> None:
    # IPython keeps what was typed in a module that has no file.
    session = ModuleType("session")
    monkeypatch.setitem(sys.modules, "session", session)
    session.In = ["", IMPORTS, cell, SCALE]  # type: ignore[attr-defined]
    for text in session.In:
        exec(text, vars(session))

    with pytest.raises(moonpool.LoadFailed, match=why):
        source_of(session.Scale)


@pytest.mark.promise("The package", "A class of a notebook's cell …")
@pytest.mark.parametrize(
    "cell",
    [
        "ONE = 1\nFACTOR = [ONE, (ONE, 2), {'a': ONE, 'b': -1.5}, {ONE, 1}]",
        "import os\nos.moonpool_was_here = 1\nFACTOR = (np.pi, 1 + 2, os.sep)",
        "class Other: n = 1\nOther.n = 2\nFACTOR = 1",
    ],
)
def test_an_unchanged_value_is_copied(monkeypatch: pytest.MonkeyPatch, cell: str) -> None:
    session = ModuleType("session")
    monkeypatch.setitem(sys.modules, "session", session)
    monkeypatch.setattr(os, "moonpool_was_here", 0, raising=False)
    session.In = ["", IMPORTS, cell, SCALE]  # type: ignore[attr-defined]
    for text in session.In:
        exec(text, vars(session))

    taken: dict[str, object] = {}
    exec(source_of(session.Scale), taken)

    assert taken["FACTOR"] == session.FACTOR


@pytest.mark.promise("The package", "A class of a notebook's cell …")
def test_the_error_shows_the_two_lines_that_help(tmp_path: Path) -> None:
    text = run(tmp_path, IMPORTS, "FACTOR = np.float32(2)", SCALE, ask())

    assert "it uses 'FACTOR'" in text
    assert "  %%writefile scale.py" in text
    assert '  runtime.load("scale", "scale.py")' in text
    assert "ANSWER [[" not in text


@pytest.mark.promise("The package", "A class of a notebook's cell …")
def test_the_two_lines_that_help_do(tmp_path: Path) -> None:
    cells = (
        f"%%writefile scale.py\n{IMPORTS}\nFACTOR = np.float32(2)\n{SCALE}",
        'import moonpool\nimport numpy as np\nruntime = moonpool.Runtime()\nruntime.load("scale", "scale.py")',
        'print(runtime.infer("scale", {"X": np.ones((1, 3), np.float32)})["OUTPUT0"].tolist())',
        "runtime.close()",
    )

    assert "[[2.0, 2.0, 2.0]]" in run(tmp_path, *cells)


def test_a_class_in_a_cell_is_tested_in_process(tmp_path: Path) -> None:
    test = """
import moonpool.testing
with moonpool.testing.load(Scale) as model:
    print("ANSWER", model.infer({"X": np.ones((1, 3), np.float32)})["OUTPUT0"].tolist())
"""
    text = run(tmp_path, IMPORTS, "FACTOR = np.float32(2)", SCALE, test)

    assert "ANSWER [[2.0, 2.0, 2.0]]" in text, text


def test_the_source_of_a_piped_program_is_not_kept(tmp_path: Path) -> None:
    program = f"{IMPORTS}\nFACTOR = 2\n{SCALE}\nimport moonpool\nmoonpool.Runtime().load('m', Scale)"
    ended = subprocess.run(
        [sys.executable, "-"],
        input=program,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "what was typed there is not kept" in ended.stderr
    assert "  %%writefile scale.py" in ended.stderr
