"""The files that a model may read and change."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import Attacker
from tests.hostile.attempts import REFUSED, UNCHANGED, Attempt, made
from tests.hostile.conftest import Attackers

import moonpool

FILE = {"path": "$file"}
WEIGHTS = {"path": "$weights"}
# Landlock answers EXDEV to a link or a rename out of the allowed folders.
CROSSING = (*UNCHANGED, "EXDEV")


def change(what: str, arguments: Mapping[str, object] | None = None, off: tuple[str, ...] = ("done",)) -> Attempt:
    """An attempt to change something."""
    return Attempt(what, arguments or {}, UNCHANGED, off)


READS = {
    "a file of the machine": Attempt("files.read", {"path": "/etc/passwd"}),
    "a file that only the runtime may read": Attempt("files.read", FILE),
    "another model's weights": Attempt("files.read", WEIGHTS),
    "another model's folder": Attempt("files.listing", {"path": "$folder"}),
    "by a symbolic link of its own": Attempt("files.read_by_symlink", FILE),
    "by a symbolic link in its model directory": Attempt("files.read", {"path": "$symlink"}),
    "by its root folder": Attempt("files.read_from_root", FILE),
    "by ever so many dots": Attempt("files.read_by_dots", FILE),
    "by a hard link": Attempt("files.link", FILE | {"to": "link"}, CROSSING, ()),
    "from a working directory": Attempt("files.go_to", FILE),
    "by being told of its changes": Attempt("files.watch", FILE),
    "the folder of all models": Attempt("files.listing", {"path": "$repository"}),
    "homes": Attempt("files.listing", {"path": "/home"}),
    "the folder of temporary files": Attempt("files.listing", {"path": "/tmp"}),
    "the root folder": Attempt("files.listing", {"path": "/"}),
    "names of devices": Attempt("files.listing", {"path": "/dev"}),
    "the kernel's settings": Attempt("files.read", {"path": "/proc/sys/kernel/hostname"}),
    "who is mounted where": Attempt("files.read", {"path": "/proc/mounts"}),
    "the machine's log": Attempt("files.read", {"path": "/dev/kmsg"}, off=()),
    "the machine's memory": Attempt("files.read", {"path": "/dev/mem"}, (*REFUSED, "ENOENT"), ()),
}

WRITES = {
    "a file of the runtime's user": change("files.open_to_write", FILE),
    "cutting it short": change("files.truncate", FILE),
    "removing it": change("files.unlink", {"path": "$victim"}),
    "renaming it": Attempt("files.rename", FILE | {"to": "renamed"}, CROSSING, ()),
    "its mode": change("files.change_mode", FILE),
    "its owner": change("files.change_owner", FILE),
    "its times": change("files.change_times", FILE),
    "its attributes": change("files.set_attribute", FILE, off=()),
    "a new file": change("files.create", {"path": "$new"}),
    "a new file without a name": change("files.create_unnamed", {"folder": "$folder"}),
    "a new folder": change("files.make_folder", {"path": "$new"}),
    "a pipe": change("files.make_pipe", {"path": "$new"}),
    "a device": change("files.make_device", {"path": "$new"}, off=()),
    "a device in its scratch": change("files.make_device", {"path": "device"}, off=()),
    "its own model": change("files.open_to_write", {"path": "$model"}),
    "a file beside its own model": change("files.create", {"path": "$beside"}),
    "its own model's mode": change("files.change_mode", {"path": "$model"}),
    "the interpreter": change("files.open_to_write", {"path": "$python"}, off=()),
    "its own memory by its file": change("self.rewrite_itself"),
    "its place among the killed": change("self.protect_from_oom", off=()),
}


@pytest.fixture(scope="module")
def scene(
    runtime: moonpool.Runtime,  # noqa: ARG001 - to be there before
    model_folder: Path,
) -> Iterator[dict[str, Any]]:
    # All users may enter this folder, so only the sandbox protects it.
    with tempfile.TemporaryDirectory(prefix="moonpool-hostile-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        for each, mode in (("file", 0o600), ("victim", 0o666), ("weights", 0o644)):
            (folder / each).write_text("not for you")
            (folder / each).chmod(mode)
        (model_folder / "symlink").symlink_to(folder / "file")
        yield {
            "file": str(folder / "file"),
            "folder": str(folder),
            "victim": str(folder / "victim"),
            "new": str(folder / "new"),
            "weights": str(folder / "weights"),
            "symlink": str(model_folder / "symlink"),
            "repository": str(model_folder.parent),
            "model": str(model_folder / "1" / "model.py"),
            "beside": str(model_folder / "1" / "beside.py"),
            "python": os.path.realpath(sys.executable),
        }
        (model_folder / "symlink").unlink()


@pytest.mark.promise(
    "The sandbox: `strict`",
    "A contained model reads its interpreter with its packages, its environment, its own "
    "directory and a short list of files without secrets, and nothing else by any path: links, "
    "`..`, `/proc/self/root`, another working directory.",
)
@pytest.mark.parametrize("attempt", READS)
def test_a_model_reads_nothing_that_is_not_its_own(attackers: Attackers, scene: dict[str, Any], attempt: str) -> None:
    outcome = made(attackers("strict"), READS[attempt], scene)

    assert outcome.word in READS[attempt].strict, outcome


@pytest.mark.promise(
    "The sandbox: `strict`",
    "It changes nothing outside its scratch folder: no contents, names, modes, owners, times or "
    "devices, and not its own model either.",
)
@pytest.mark.parametrize("attempt", WRITES)
def test_a_model_changes_nothing_outside_its_scratch_folder(
    attackers: Attackers, scene: dict[str, Any], attempt: str
) -> None:
    outcome = made(attackers("strict"), WRITES[attempt], scene)

    assert outcome.word in WRITES[attempt].strict, outcome


@pytest.mark.promise("Hostile models", "The same attacks succeed without a …")
@pytest.mark.parametrize("attempt", [name for name, each in (READS | WRITES).items() if each.off])
def test_without_a_sandbox_files_are_within_reach(attackers: Attackers, scene: dict[str, Any], attempt: str) -> None:
    outcome = made(attackers("off"), (READS | WRITES)[attempt], scene)

    assert outcome.word in (READS | WRITES)[attempt].off, outcome


@pytest.mark.promise(
    "The sandbox: `strict`",
    "The scratch folder is its working directory, `HOME` and `TMPDIR`. The folder has a size "
    "limit, no other process sees it, and it is removed with the process.",
)
def test_the_scratch_folder_is_the_working_directory_the_home_and_the_place_of_temporary_files(
    attackers: Attackers,
) -> None:
    found = attackers("strict").finds("self.places")

    assert found["cwd"] == found["home"] == found["tmp"]
    assert found["scratch_writable"]
    assert attackers("strict").finds("self.tempfiles").startswith(found["cwd"])


def kept_by(attacker: Attacker) -> Path:
    return Path(attacker.finds("files.keep", name="kept"))


@pytest.mark.promise("The sandbox: `strict`", "The scratch folder …")
def test_the_scratch_folder_is_private_and_goes_with_the_process(attackers: Attackers) -> None:
    attacker = attackers("strict")
    kept = kept_by(attacker)
    outcome = attacker.tries("self.crash", how="exit")

    assert outcome.word == "died"
    assert attacker.finds("self.places")["cwd"] != str(kept.parent)
    assert not kept.exists()
    assert not kept.parent.exists()
