"""Runs the commands of docs/ENVIRONMENTS.md that pack an environment, and models in the archives."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosting import MODELS, Config, hosted, tensor

import moonpool

pytestmark = pytest.mark.promise(
    "Environments",
    "Archives that venv-pack, conda-pack, GNU tar, Info-ZIP and Python made are unpacked to "
    "what was packed, with hard links, sparse files and symbolic links. The commands of the "
    "page make environments that models run in.",
)

PAGE = Path(__file__).parents[2] / "docs" / "ENVIRONMENTS.md"
SIGNATURE: Config = {"input": [tensor("CODE", "STRING", -1)], "output": [tensor("SAID", "STRING", -1)]}


def commands() -> list[str]:
    """Return the commands under "Pack an environment", one in a line."""
    section = re.search(r"(?ms)^## Pack an environment$(.*?)^## ", PAGE.read_text())
    block = section and re.search(r"(?ms)^```sh\n(.*?)^```$", section[1])
    return [line.partition("  #")[0] for line in block[1].splitlines()] if block else []


def kinds(command: str) -> list[str]:
    """Return the fixtures of a command's environments: `conda`, `virtual` or both."""
    return {"venv-pack": ["virtual"], "conda-pack": ["conda"]}.get(command.split()[0], ["virtual", "conda"])


def programs(command: str) -> list[str]:
    return re.findall(r"\b(venv-pack|conda-pack|tar|zip|xz|bzip2)(?=\s|$)", command)


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unpack into the test's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_page_has_a_command_for_each_tool() -> None:
    assert {program for command in commands() for program in programs(command)} >= {
        "venv-pack",
        "conda-pack",
        "tar",
        "zip",
    }


@pytest.mark.parametrize(("command", "kind"), [(command, kind) for command in commands() for kind in kinds(command)])
def test_a_model_runs_in_what_the_command_packs(
    runtime: moonpool.Runtime, request: pytest.FixtureRequest, tmp_path: Path, command: str, kind: str
) -> None:
    # The packers are installed beside the interpreter of the tests.
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    for program in programs(command):
        if shutil.which(program, path=path) is None:
            pytest.skip(f"there is no {program}")
    source: Path = request.getfixturevalue(kind)
    # The documented commands expect a folder of this name. It is a copy, because conda-pack finds nothing through a
    # link.
    subprocess.run(["cp", "-a", source, tmp_path / "env"], check=True)
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    # From here on, only the archive exists.
    shutil.rmtree(tmp_path / "env")
    (archive,) = tmp_path.glob("env.*")
    parameters = {"EXECUTION_ENV_PATH": {"string_value": str(archive)}}

    with hosted(runtime, "m", MODELS / "evaluate.py", {**SIGNATURE, "parameters": parameters}):
        where, prefix, variable = said(
            runtime,
            "(__import__('only_here').WHERE, sys.prefix,"
            " 'CONDA_PREFIX' if 'CONDA_PREFIX' in os.environ else 'VIRTUAL_ENV')",
        )

    assert where.startswith(f"{tmp_path}/cache/moonpool/environments/")
    assert where.startswith(f"{prefix}/lib/")
    assert variable == ("CONDA_PREFIX" if kind == "conda" else "VIRTUAL_ENV")


def said(runtime: moonpool.Runtime, code: str) -> Any:
    text = runtime.infer("m", {"CODE": [code]}, timeout_s=60.0)["SAID"][0].decode()
    return ast.literal_eval(text)
