"""Tests of the folders in which models keep what their libraries compile."""

from __future__ import annotations

import ast
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosting import MODELS, Config, options, tensor

import moonpool
from moonpool.runtime.isolation import plan
from moonpool.runtime.repository.folder_cache import cache_root

FILE = MODELS / "evaluate.py"
SIGNATURE: Config = {"input": [tensor("CODE", "STRING", -1)], "output": [tensor("SAID", "STRING", -1)]}
# Appends to a file where PyTorch would keep what it compiles, and says what is there then.
KEEPS = (
    "(lambda f: (__import__('os').makedirs(f, exist_ok=True), open(f + '/kept', 'a').write('x'), "
    "open(f + '/kept').read())[-1])(__import__('os').environ['TORCHINDUCTOR_CACHE_DIR'])"
)


def said(runtime: moonpool.Runtime, model: str, code: str) -> Any:
    text = runtime.infer(model, {"CODE": [code]}, timeout_s=60.0)["SAID"][0].decode()
    return ast.literal_eval(text)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[moonpool.Runtime]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    grants = [f"{name}:MOONPOOL_COMPILE_CACHE=yes" for name in ("one", "other")]
    with moonpool.Runtime(sandbox_grants=grants) as runtime:
        yield runtime


@pytest.mark.promise(
    "Environments",
    "What a model's libraries compile is kept for its next process, also at `strict`, and no other model sees it.",
)
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_what_is_compiled_is_kept_for_the_model_alone(runtime: moonpool.Runtime, level: str) -> None:
    config = SIGNATURE | options(COMPILE_CACHE="yes", SANDBOX=level)
    for name in ("one", "other"):
        runtime.load(name, FILE, config=config, instances=2)
    written = [said(runtime, "one", KEEPS) for _ in range(4)]
    runtime.load("one", FILE, config=config)

    assert written == ["x", "xx", "xxx", "xxxx"]
    assert said(runtime, "one", KEEPS) == "xxxxx"
    assert said(runtime, "other", KEEPS) == "x"
    folders = list((cache_root() / "compiled").iterdir())
    assert [stat.S_IMODE(each.stat().st_mode) for each in folders] == [0o700, 0o700]
    if os.geteuid() == 0 and level == "strict":
        assert len({each.stat().st_uid for each in folders} - {0}) == 2
    if level == "strict":
        other = next(each for each in folders if (each / "inductor" / "kept").read_text() == "x")
        # Landlock refuses to open a folder, and not to ask for its rights. A folder that may be read yields at least
        # itself.
        code = f"[*__import__('os').walk({str(other)!r})] != []"
        assert said(runtime, "one", code) is False


@pytest.mark.promise(
    "Environments", "What is compiled for files that a client brings is kept for the next load of the same files."
)
def test_files_that_a_client_brings_have_one_folder(runtime: moonpool.Runtime) -> None:
    config = SIGNATURE | options(COMPILE_CACHE="yes")
    files = {"1/model.py": FILE.read_bytes()}
    for kept in ("x", "xx"):
        runtime.load("one", files=files, config=config)
        assert said(runtime, "one", KEEPS) == kept
        runtime.unload("one")

    runtime.load("one", files={"1/model.py": FILE.read_bytes() + b"\n"}, config=config)
    assert said(runtime, "one", KEEPS) == "x"
    assert len(list((cache_root() / "compiled").iterdir())) == 2


@pytest.mark.promise("Environments", "A contained model needs a grant to keep what it compiles.")
def test_a_contained_model_needs_a_grant() -> None:
    with (
        moonpool.Runtime(sandbox="strict") as runtime,
        pytest.raises(moonpool.MoonpoolError, match="MOONPOOL_COMPILE_CACHE=yes"),
    ):
        runtime.load("m", FILE, config=SIGNATURE | options(COMPILE_CACHE="yes"))


def test_a_cache_that_others_may_write_into_is_refused(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    (tmp_path / "cache" / "moonpool" / "compiled").mkdir(parents=True)
    (tmp_path / "cache" / "moonpool" / "compiled").chmod(0o777)

    with pytest.raises(moonpool.LoadFailed, match="no other user may write to it"):
        runtime.load("one", FILE, config=SIGNATURE | options(COMPILE_CACHE="yes"))


def test_a_cache_that_another_process_keeps_locked_is_told(
    runtime: moonpool.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_ALONE_S", 0.1)
    cache = tmp_path / "cache" / "moonpool" / "compiled"
    cache.mkdir(parents=True, mode=0o700)
    lock = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(moonpool.LoadFailed, match=f"{cache} locked for 0.1 s: end it"):
            runtime.load("one", FILE, config=SIGNATURE | options(COMPILE_CACHE="yes"))
    finally:
        os.close(lock)
