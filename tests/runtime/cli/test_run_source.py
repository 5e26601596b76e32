"""`moonpool run`: what it takes, what it prints, and its exit codes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.runtime.cli.shell import CommandLine


@pytest.mark.promise("The command line", "`moonpool run` runs a file in a sandbox, with inputs and files.")
def test_a_file_is_run_with_inputs_and_files(cli: CommandLine) -> None:
    np.save(cli.folder / "x.npy", np.arange(3.0))
    (cli.folder / "in.csv").write_text("1,2")
    (cli.folder / "snippet.py").write_text(
        "import sys\nprint(open('in.csv').read())\nprint('warned', file=sys.stderr)\n"
        "open('out/got.txt', 'w').write(open('renamed').read())\n{'sum': x.sum() + n, 'x': x}"
    )
    arguments = ("--input", "x=@x.npy", "--input", "n=1", "--file", "in.csv", "--file", "renamed=in.csv")

    ended = cli("run", "snippet.py", *arguments, "--out", "results", "--json")

    assert (ended.stdout, ended.stderr) == ('1,2\n{"sum": 4.0, "x": [0.0, 1.0, 2.0]}\n', "warned\n")
    assert ended.returncode == 0
    assert (cli.folder / "results" / "got.txt").read_text() == "1,2"


def test_the_exit_code_tells_what_happened(cli: CommandLine) -> None:
    (cli.folder / "s.py").write_text("1 / 0")
    ended = cli("run", "s.py")
    assert ended.returncode == 1
    assert ended.stderr.endswith("    1 / 0\n     ~~^~~\nmoonpool: error: ZeroDivisionError: division by zero\n")
    (cli.folder / "s.py").write_text("while True: pass")
    ended = cli("run", "s.py", "--timeout", "0.5")
    assert ended.returncode == 124
    assert ended.stderr.endswith("did not end within 0.5 s and was killed (limit: timeout_s)\n")
    (cli.folder / "s.py").write_text("x = bytearray(1 << 30)")
    assert cli("run", "s.py", "--memory", "100M").returncode == 137
    assert cli("run", "s.py", "--memory", "x").returncode == 2
    assert cli("run", "missing.py").returncode == 1


def test_any_value_is_shown(cli: CommandLine) -> None:
    (cli.folder / "s.py").write_text("{b'k': [b'\\xff', 1j, {1: np.zeros(1)}], None: 10 ** 4301, 'n': 10 ** 4290}")
    (cli.folder / "s.py").write_text("import numpy as np\n" + (cli.folder / "s.py").read_text())
    assert cli("run", "s.py").returncode == 0
    (cli.folder / "s.py").write_text("{b'k': [b'\\xff', 1j]}")
    assert cli("run", "s.py", "--json").stdout == '{"k": ["\\\\xff", "1j"]}\n'
