"""`moonpool completion`: what bash offers after TAB."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.cli.shell import MODELS, PATIENCE_S, CommandLine, environment

needs_argcomplete = pytest.mark.skipif(
    not importlib.util.find_spec("argcomplete"), reason="argcomplete is not installed"
)


@pytest.fixture
def shell(cli: CommandLine) -> Path:
    """A folder with the command `moonpool` and a link `models` to some."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    command = cli.folder / "moonpool"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m moonpool "$@"\n')
    command.chmod(0o755)
    (cli.folder / "models").symlink_to(MODELS)
    (cli.folder / "script").write_text(cli("completion", "bash").stdout)
    return cli.folder


def offered(folder: Path, line: str) -> set[str]:
    """Return the words that bash offers after TAB at the end of a line."""
    words = [*line.split(" ")]
    script = f"""
        PATH="$PWD:$PATH"
        eval "$(cat script)"
        COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)} COMP_TYPE=9
        COMP_WORDS=({" ".join(map(shlex.quote, words))}) COMP_CWORD={len(words) - 1}
        "$(complete -p moonpool | sed 's/.*-F \\([^ ]*\\).*/\\1/')" moonpool {shlex.quote(words[-1])} {shlex.quote(words[-2])}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    ended = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.stderr == ""
    return set(ended.stdout.replace("\\", "").split())


@pytest.mark.promise(
    "The command line",
    "`moonpool completion` lets bash complete commands, options, values, directories and names of models.",
)
@pytest.mark.slow
@needs_argcomplete
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("moonpool ch", {"check"}),
        ("moonpool check --sandbox str", {"strict"}),
        ("moonpool check models --all", {"--allow-missing"}),
        ("moonpool infer models add", {"add_sub"}),
        ("moonpool bench models norm", {"normalise"}),
        ("moonpool check mod", {"models/"}),
        ("moonpool infer mod", {"models/"}),
        ("moonpool serve models --http-po", {"--http-port"}),
        ("moonpool triton over", {"overlay"}),
    ],
)
def test_bash_offers_what_fits(shell: Path, line: str, wanted: set[str]) -> None:
    assert offered(shell, line) == wanted


@needs_argcomplete
@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(cli: CommandLine, name: str) -> None:
    ended = cli("completion", name)

    assert ended.returncode == 0
    assert "moonpool" in ended.stdout


def test_without_the_package_it_is_said_how_to_get_it(cli: CommandLine) -> None:
    (cli.folder / "argcomplete.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'argcomplete'\", name='argcomplete')\n"
    )
    ended = cli("completion", "bash")

    assert ended.returncode == 1
    assert "argcomplete is not installed: " in ended.stderr
    assert "-m pip install 'argcomplete>=" in ended.stderr
