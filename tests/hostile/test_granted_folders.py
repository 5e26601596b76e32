"""Folders that models are granted: every instance has their owner's rights in them, and nowhere else."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests import as_nobody, lesser_kernel
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import Attacker, copied, load_attacker
from tests.hostile.attempts import UNCHANGED
from tests.hostile.conftest import Attackers
from tests.waiting import wait_until

import moonpool
from moonpool.ipc.policy import FIRST_SHARED_USER
from moonpool.runtime.cli.sandbox import try_layer
from moonpool.stub.sandbox.granted import closed_above, opened
from moonpool.stub.sandbox.outcome import SandboxRefused

ROOT, SOMEBODY = 0, 1234
# Each has an owner and a mode. A user without rights has only folders of their own.
FOLDERS = [
    pytest.param(owner, mode, id=f"{mode:o}-{'root' if owner == ROOT else 'user'}")
    for owner in (ROOT, SOMEBODY)
    for mode in (0o755, 0o700)
]

Make = Callable[..., Path]
Load = Callable[..., Attacker]


@pytest.fixture
def make() -> Iterator[Make]:
    """Folders with a file in them, of this owner and mode; the file is the owner's alone."""
    made: list[str] = []

    def new(owner: int, mode: int = 0o755, file_mode: int = 0o600) -> Path:
        made.append(os.path.realpath(tempfile.mkdtemp(prefix="moonpool-granted-")))
        folder = Path(made[-1])
        (folder / "file").write_text("before")
        (folder / "file").chmod(file_mode)
        if os.geteuid() == ROOT:
            for path in (folder, folder / "file"):
                os.chown(path, owner, owner)
        folder.chmod(mode)
        return folder

    yield new
    for path in made:
        Path(path).chmod(0o700)
        shutil.rmtree(path)


@pytest.fixture
def load(runtime: moonpool.Runtime, model_folder: Path) -> Iterator[Load]:
    """Attackers with these paths granted, each in one instance."""
    loaded: list[str] = []

    def new(name: str, paths: str, **settings: object) -> Attacker:
        granted = {"SANDBOX_PATHS": paths} | settings
        attacker = load_attacker(runtime, "strict", model_folder, name, **granted)
        loaded.append(name)
        return attacker

    yield new
    for name in loaded:
        if name in runtime.models():
            runtime.unload(name)


def owner_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_uid, status.st_gid


def ended(attacker: Attacker) -> None:
    """Kill the instance, and wait for the next one."""
    before = attacker.pid
    os.kill(before, signal.SIGKILL)
    wait_until(
        lambda: attacker.runtime.instances(attacker.name)[0]["pid"] not in (before, None), what="another process"
    )


@pytest.mark.promise(
    "Layers of the sandbox",
    "Instances, models and restarts share a folder that was granted with `rw:`, for every owner "
    "and mode, and also files that only their owner may read. The files that they write belong "
    "to the folder's owner.",
)
@pytest.mark.parametrize(("owner", "mode"), FOLDERS)
def test_instances_and_restarts_share_a_folder_that_was_granted_to_be_written(
    make: Make, load: Load, owner: int, mode: int
) -> None:
    folder = make(owner, mode)
    expected = owner_of(folder)
    first, second = (load(name, f"rw:{folder}") for name in ("first", "second"))

    assert first.finds("files.read", path=f"{folder}/file") == 6
    first.finds("files.write", path=f"{folder}/written", text="first")
    # Only the owner can read the file that this leaves.
    first.finds("files.replace", path=f"{folder}/replaced", text="first")
    assert second.finds("files.read", path=f"{folder}/replaced") == 5
    second.finds("files.replace", path=f"{folder}/written", text="second")
    second.finds("files.write", path=f"{folder}/file", text="second")
    ended(first)

    assert first.finds("files.read", path=f"{folder}/written") == 6
    assert first.finds("files.listing", path=str(folder)) == 3
    first.finds("files.unlink", path=f"{folder}/written")
    assert {owner_of(path) for path in folder.iterdir()} == {expected}
    assert stat.S_IMODE((folder / "replaced").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == mode


@pytest.mark.promise(
    "Layers of the sandbox",
    "A model reads a folder that was granted for reading as its owner does, and changes nothing in it.",
)
@pytest.mark.parametrize(("owner", "mode"), FOLDERS)
def test_a_folder_that_was_granted_to_be_read_is_read_as_its_owner_reads_it(
    make: Make, load: Load, owner: int, mode: int
) -> None:
    folder = make(owner, mode)
    reader = load("reader", str(folder))

    assert reader.finds("files.read", path=f"{folder}/file") == 6
    assert reader.finds("files.listing", path=str(folder)) == 1
    for what in ("files.open_to_write", "files.unlink", "files.change_mode", "files.change_times"):
        assert reader.tries(what, path=f"{folder}/file").word in ("EACCES", "EROFS", "EPERM")
    assert reader.tries("files.create", path=f"{folder}/new").word in ("EACCES", "EROFS")


@pytest.mark.promise("Layers of the sandbox", "In a sticky folder that is …")
def test_one_file_can_be_granted(make: Make, load: Load) -> None:
    folder = make(SOMEBODY, 0o755)
    writer = load("writer", f"rw:{folder}/file")

    writer.finds("files.write", path=f"{folder}/file", text="after")

    assert (folder / "file").read_text() == "after"
    assert writer.tries("files.create", path=f"{folder}/new").word in ("EACCES", "EROFS")


@pytest.mark.promise("Layers of the sandbox", "Instances, models and restarts share a …")
def test_forks_of_a_template_share_a_granted_folder(make: Make, load: Load) -> None:
    folder = make(SOMEBODY, 0o700)
    forked = load("forked", f"rw:{folder}", PREFORK="imports")

    forked.finds("files.replace", path=f"{folder}/file", text="forked")
    ended(forked)

    assert forked.finds("files.read", path=f"{folder}/file") == 6
    assert owner_of(folder / "file") == owner_of(folder)


@pytest.mark.promise("Layers of the sandbox", "Instances, models and restarts share a …")
def test_a_folder_below_a_closed_one_is_reached(make: Make, load: Load) -> None:
    closed = make(ROOT, 0o755)
    inner = closed / "inner"
    inner.mkdir(mode=0o700)
    closed.chmod(0o700)
    writer = load("writer", f"rw:{inner}")

    writer.finds("files.write", path=f"{inner}/new", text="new")

    assert (inner / "new").read_text() == "new"
    # What a contained model writes is closed to other users.
    assert stat.S_IMODE((inner / "new").stat().st_mode) == 0o600
    assert writer.tries("files.read", path=f"{closed}/file").word in ("EACCES", "ENOENT")


# Attacks with the owner's rights


@pytest.fixture
def lent(make: Make, load: Load) -> tuple[Path, Attacker]:
    """A folder of root's that a model may write to, or one of this user's, and the model."""
    folder = make(ROOT, 0o755)
    return folder, load("borrower", f"rw:{folder}")


SET_IDS = (0o4755, 0o2755, 0o6711)


@pytest.mark.promise(
    "Layers of the sandbox",
    "In a granted folder, an instance makes no program that gives others the owner's rights: no "
    "set-user-ID or set-group-ID bit, no capabilities of files, no other owner, no device. Such "
    "programs and devices that are in it already give the instance nothing.",
)
@pytest.mark.parametrize("mode", SET_IDS)
def test_no_program_is_made_that_gives_others_the_owner_s_rights(lent: tuple[Path, Attacker], mode: int) -> None:
    folder, borrower = lent
    new = f"{folder}/new"

    assert borrower.tries("files.set_mode", path=f"{folder}/file", mode=mode).word == "EPERM"
    assert borrower.tries("files.make_with_mode", path=new, mode=mode).word == "EPERM"
    assert borrower.tries("files.make_with_old_call", path=new, mode=mode).word in ("EPERM", "OSError")
    assert borrower.tries("files.make_unnamed_with_mode", folder=str(folder), mode=mode).word == "EPERM"

    assert [path.name for path in folder.iterdir()] == ["file"]
    assert not (folder / "file").stat().st_mode & 0o6000
    assert borrower.finds("files.set_mode", path=f"{folder}/file", mode=0o755) == 0o755


def test_without_the_filter_such_a_program_could_be_made(make: Make, attackers: Attackers) -> None:
    """Here the attempts above are seen to work."""
    folder = make(os.geteuid())
    trusted = attackers("off")

    assert trusted.finds("files.set_mode", path=f"{folder}/file", mode=0o4755) == 0o4755
    assert trusted.finds("files.make_with_mode", path=f"{folder}/new", mode=0o4755) & 0o4000
    trusted.finds("files.make_with_old_call", path=f"{folder}/old", mode=0o4755)
    assert (folder / "old").stat().st_mode & 0o4000


@pytest.mark.promise("Layers of the sandbox", "In a granted folder, an …")
def test_the_grant_of_a_call_does_not_take_that_off(make: Make, load: Load) -> None:
    folder = make(ROOT)
    borrower = load("borrower", f"rw:{folder}", SANDBOX_SYSCALLS="chmod, fchmodat, open, mknodat")

    assert borrower.tries("files.set_mode", path=f"{folder}/file", mode=0o4755).word == "EPERM"
    assert borrower.tries("files.make_with_mode", path=f"{folder}/x", mode=0o4755).word == "EPERM"


@pytest.mark.promise("Layers of the sandbox", "In a granted folder, an …")
def test_a_call_that_hides_its_mode_is_not_granted_beside_a_lent_folder(make: Make, load: Load, is_root: bool) -> None:
    if not is_root:
        pytest.skip("this user lends nothing")
    folder = make(ROOT)

    with pytest.raises(moonpool.LoadFailed, match="take it out of MOONPOOL_SANDBOX_SYSCALLS"):
        load("borrower", f"rw:{folder}", SANDBOX_SYSCALLS="openat2")


@pytest.mark.promise("Layers of the sandbox", "In a granted folder, an …")
def test_owners_capabilities_and_devices_are_not_given(lent: tuple[Path, Attacker]) -> None:
    folder, borrower = lent
    file = f"{folder}/file"

    (itself,) = set(borrower.finds("self.identity")["uids"])
    for user in (ROOT, SOMEBODY, 60600, 60601, 65534):
        if user != itself:
            # In a user namespace, or on a mount with mapped ids, most users have no name.
            refused = ("EPERM", "EINVAL", "EOVERFLOW")
            assert borrower.tries("files.give_to", path=file, user=user).word in refused
    assert borrower.tries("files.set_capability", path=file).word == "EPERM"
    assert borrower.tries("files.make_device", path=f"{folder}/device").word in ("EPERM", "EACCES")
    flags = borrower.finds("files.flags_of_mount", path=str(folder))
    assert flags & os.ST_NOSUID
    assert flags & 4  # ST_NODEV, for which Python has no name
    assert owner_of(folder / "file") == owner_of(folder)


@pytest.mark.promise("Layers of the sandbox", "In a granted folder, an …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_device_that_lies_in_a_granted_folder_is_not_opened(make: Make, load: Load) -> None:
    folder = make(ROOT)
    os.mknod(folder / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    os.chmod(folder / "zero", 0o666)

    for name, paths in {"reader": str(folder), "writer": f"rw:{folder}"}.items():
        assert load(name, paths).tries("files.read", path=f"{folder}/zero").word == "EACCES"


@pytest.mark.promise("Layers of the sandbox", "In a granted folder, an …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_program_with_set_ids_that_lies_there_gives_nothing(make: Make, load: Load) -> None:
    folder = make(ROOT)
    shutil.copy("/bin/true", folder / "program")
    (folder / "program").chmod(0o4755)
    borrower = load("borrower", f"rw:{folder}", SANDBOX_SYSCALLS="fork")

    assert borrower.tries("processes.execute_program", path=f"{folder}/program").word != "done"
    # When the owner changes the program, it loses the bit.
    borrower.finds("files.write", path=f"{folder}/program", text="#!/bin/sh")
    assert not (folder / "program").stat().st_mode & 0o6000


@pytest.mark.promise(
    "Layers of the sandbox",
    "The rights that a granted folder gives end with the folder: at links, hard links, renames, "
    "other granted folders, mounts below it, and files in it that belong to somebody else.",
)
def test_names_lead_nowhere_outside(make: Make, load: Load) -> None:
    folder, other = make(ROOT), make(ROOT)
    borrower, neighbour = load("borrower", f"rw:{folder}"), load("neighbour", f"rw:{other}")
    (folder / "symlink").symlink_to(other / "file")
    (folder / "dots").symlink_to("../../../../../../etc")

    refused = ("EACCES", "EROFS", "EXDEV", "EPERM", "ENOENT")
    for path in (f"{other}/file", f"{folder}/symlink", f"{folder}/dots/passwd"):
        assert borrower.tries("files.read", path=path).word in refused
        assert borrower.tries("files.open_to_write", path=path).word in refused
    for path, to in (
        (f"{other}/file", f"{folder}/link"),
        (f"{folder}/file", f"{other}/link"),
        ("/etc/passwd", f"{folder}/link"),
        (f"{folder}/file", "link"),
        (sys.executable, f"{folder}/link"),
    ):
        assert borrower.tries("files.link", path=path, to=to).word in refused
        assert borrower.tries("files.rename", path=path, to=to).word in refused
    assert neighbour.finds("files.read", path=f"{other}/file") == 6


@pytest.mark.promise(
    "Layers of the sandbox", "A pipe or a socket in a granted folder, or under a granted name, makes nothing wait."
)
def test_nobody_waits_for_pipes_and_sockets(make: Make, load: Load) -> None:
    folder = make(ROOT)
    os.mkfifo(folder / "pipe")
    (folder / "pipe").chmod(0o666)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/socket")
        server.listen()
        borrower = load("borrower", f"rw:{folder}, rw:{folder}/pipe, {folder}/socket")

        assert borrower.finds("files.listing", path=str(folder)) == 3
        assert borrower.tries("network.unix", path=f"{folder}/socket").word == "EPERM"


@pytest.mark.promise("Layers of the sandbox", "The rights that a granted …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_files_of_other_users_in_the_folder_stay_theirs(make: Make, load: Load) -> None:
    """Somebody may have linked a file of root's into a folder of his own."""
    secret, folder = make(ROOT), make(SOMEBODY)
    os.link(secret / "file", folder / "linked")
    borrower = load("borrower", f"rw:{folder}")

    assert borrower.tries("files.read", path=f"{folder}/linked").word == "EACCES"
    assert borrower.tries("files.open_to_write", path=f"{folder}/linked").word == "EACCES"
    assert borrower.tries("files.set_mode", path=f"{folder}/linked", mode=0o666).word == "EPERM"


@pytest.mark.promise(
    "Layers of the sandbox",
    "A granted path is no link and lies behind none. So a model that may write to a folder above "
    "it cannot lead the grant elsewhere.",
)
def test_a_folder_that_another_model_replaced_by_a_link_is_not_granted(make: Make, load: Load) -> None:
    outer, secret = make(ROOT), make(ROOT, 0o700)
    inner = outer / "inner"
    inner.mkdir()
    if os.geteuid() == ROOT:
        os.chown(inner, ROOT, ROOT)
    load("victim", f"rw:{inner}").finds("files.write", path=f"{inner}/own", text="own")
    # A model that was granted the outer folder may do this.
    inner.rename(outer / "moved")
    inner.symlink_to(secret)

    with pytest.raises(moonpool.LoadFailed, match=f"is a link or lies behind one.*{secret}"):
        load("late", f"rw:{inner}")


@pytest.mark.promise("Layers of the sandbox", "A granted path is no link …")
def test_the_process_itself_follows_no_link_to_a_granted_folder(make: Make) -> None:
    """The link was put there after the runtime had looked."""
    folder = make(ROOT)
    link = folder / "link"
    link.symlink_to(folder)
    (folder / "inner").mkdir()

    for path in (link, link / "inner"):
        with pytest.raises(SandboxRefused, match="is a link or lies behind one"):
            opened([(str(path), True)], None)


@pytest.mark.promise("Layers of the sandbox", "The rights that a granted …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_nested_grants_have_each_their_own_owner(make: Make, load: Load) -> None:
    outer = make(SOMEBODY, 0o755)
    for name, owner, mode in (("read", 77, 0o700), ("write", 78, 0o700), ("closed", 79, 0o700)):
        (outer / name).mkdir()
        (outer / name / "file").write_text("nested")
        (outer / name / "file").chmod(0o600)
        os.chown(outer / name / "file", owner, owner)
        os.chown(outer / name, owner, owner)
        (outer / name).chmod(mode)
    model = load("nested", f"{outer}, {outer}/read, rw:{outer}/write")

    assert model.finds("files.read", path=f"{outer}/file") == 6
    assert model.finds("files.read", path=f"{outer}/read/file") == 6
    model.finds("files.replace", path=f"{outer}/write/file", text="new")
    assert owner_of(outer / "write" / "file") == (78, 78)
    assert model.tries("files.read", path=f"{outer}/closed/file").word == "EACCES"
    for name in ("file", "read/file"):
        assert model.tries("files.open_to_write", path=f"{outer}/{name}").word in ("EACCES", "EROFS")


@pytest.mark.promise("Layers of the sandbox", "The rights that a granted …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_mount_in_a_granted_folder_is_not_lent(make: Make, load: Load) -> None:
    folder, other = make(ROOT), make(ROOT, 0o755)
    mounted = folder / "mounted"
    mounted.mkdir()
    subprocess.run(["mount", "--bind", str(other), str(mounted)], check=True)
    try:
        borrower = load("borrower", f"rw:{folder}")

        borrower.finds("files.write", path=f"{folder}/file", text="after")
        assert borrower.tries("files.read", path=f"{mounted}/file").word == "EACCES"
        assert borrower.tries("files.create", path=f"{mounted}/new").word == "EACCES"
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.promise(
    "Layers of the sandbox",
    "In a sticky folder that is open to all, an instance acts as its own user. One file "
    "can be granted without its folder.",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_in_a_folder_for_all_users_an_instance_is_itself(make: Make, load: Load) -> None:
    public = make(ROOT, 0o1777)
    one, two = (load(name, f"rw:{public}") for name in ("one", "two"))

    one.finds("files.replace", path=f"{public}/mine", text="one")

    assert two.tries("files.read", path=f"{public}/mine").word == "EACCES"
    for model in (one, two):
        assert model.tries("files.read", path=f"{public}/file").word == "EACCES"
        assert model.tries("files.unlink", path=f"{public}/file").word in ("EPERM", "EACCES")


# Where it does not work

PROGRAM = """
import json, sys
from pathlib import Path
import moonpool
from tests.hostile.attacker import load_attacker
found = []
with moonpool.Runtime() as runtime:
    try:
        for name in ("first", "second"):
            grants = {"SANDBOX_PATHS": sys.argv[2]}
            if sys.argv[5]:
                grants["SANDBOX_SYSCALLS"] = sys.argv[5]
            model = load_attacker(runtime, sys.argv[4], Path(sys.argv[1]), name, **grants)
            if sys.argv[2].startswith("rw:"):
                model.finds("files.replace", path=f"{sys.argv[3]}/file", text=name)
            found.append(model.finds("files.read", path=f"{sys.argv[3]}/file"))
    except moonpool.LoadFailed as error:
        found.append(str(error))
print(json.dumps(found))
"""
# These are the errors of a container without mounts of its own, of a kernel before 5.12, and of a file system without
# mapped ids.
LACKS = {
    "namespaces": {"unshare": errno.EPERM},
    "mounts": {"open_tree": errno.EPERM},
    "attributes": {"mount_setattr": errno.ENOSYS},
    "file system": {"mount_setattr": errno.EINVAL},
}


CONFIG = """
backend: "python"
input [{ name: "ATTEMPT" data_type: TYPE_STRING dims: [1] }]
output [{ name: "SAID" data_type: TYPE_STRING dims: [1] }]
instance_group [{ kind: KIND_CPU }]
parameters [
  { key: "MOONPOOL_SANDBOX" value: { string_value: "strict" } },
  { key: "MOONPOOL_SANDBOX_PATHS" value: { string_value: "GRANTED" } }
]
"""


def run(program: list[str]) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[2]), *sys.path]
    return subprocess.run(
        program,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )


def shared(
    model_folder: Path,
    folder: Path,
    grant: str,
    refusals: Mapping[str, int] | None = None,
    *,
    is_nobody: bool = False,
    level: str = "strict",
    syscalls: str = "",
) -> list[Any]:
    """Return what two models find that write to a folder one after the other, or why they do not load."""
    arguments = [str(model_folder), grant, str(folder), level, syscalls]
    program = [sys.executable, "-c", PROGRAM, *arguments]
    if refusals:
        program = lesser_kernel.command(program, **refusals)
    done = run(as_nobody.command(program) if is_nobody else program)
    if done.returncode:
        pytest.fail(done.stderr, pytrace=False)
    found: list[Any] = json.loads(done.stdout)
    return found


def cure(text: str) -> list[str]:
    """The command that an error ends with."""
    return shlex.split(text[text.rindex(": ") + 2 :])


@pytest.fixture
def open_model_folder() -> Iterator[Path]:
    """The attacker where users of their own find it, without mounts."""
    with tempfile.TemporaryDirectory(prefix="moonpool-hostile-") as name:
        Path(name).chmod(0o755)
        yield copied(Path(name) / "attacker")


@pytest.mark.promise(
    "Layers of the sandbox", "If a grant cannot work, the load fails, and the error has the command that cures it."
)
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
@pytest.mark.parametrize("what", LACKS)
@pytest.mark.parametrize("mode", [0o755, 0o700, 0o777])
def test_where_no_ids_are_mapped_the_load_fails_with_the_command_that_cures_it(
    make: Make, open_model_folder: Path, what: str, mode: int
) -> None:
    if what in ("namespaces", "mounts") and closed_above(os.path.realpath(sys.base_prefix), SOMEBODY):
        pytest.skip("every interpreter here lies in a folder that is closed to others")
    folder = make(ROOT, mode)

    (why,) = shared(open_model_folder, folder, f"rw:{folder}", LACKS[what])

    command = ["chown", "-R", f"{FIRST_SHARED_USER}:{FIRST_SHARED_USER}", str(folder)]
    assert f"cannot share {folder} as its owner, user 0" in why
    assert cure(why) == command
    subprocess.run(command, check=True)
    assert shared(open_model_folder, folder, f"rw:{folder}", LACKS[what]) == [5, 6]
    assert owner_of(folder / "file") == (FIRST_SHARED_USER, FIRST_SHARED_USER)
    # The same folder works on a kernel that lacks nothing.
    assert shared(open_model_folder, folder, f"rw:{folder}") == [5, 6]


@pytest.mark.promise(
    "Layers of the sandbox",
    "Without a filter for system calls, no folder of another user is lent. If instances "
    "share a user, the processes that one of them starts are ended by other means than the user.",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_nothing_is_lent_without_the_filter(make: Make, open_model_folder: Path) -> None:
    folder = make(ROOT)

    (why,) = shared(open_model_folder, folder, f"rw:{folder}", {"seccomp": errno.EINVAL}, level="best-effort")

    assert "seccomp: " in why
    assert shared(open_model_folder, folder, f"rw:{folder}", level="best-effort") == [5, 6]


CHANGES_MODE = """
import sys
from pathlib import Path
import moonpool
from tests.hostile.attacker import load_attacker
with moonpool.Runtime() as runtime:
    model = load_attacker(runtime, "strict", Path(sys.argv[1]), "m")
    print(model.tries("files.change_mode", path=sys.argv[2]).word)
"""


@pytest.mark.parametrize("lacks", [{}, LACKS["attributes"]], ids=["", "on a kernel that makes no mounts read-only"])
def test_a_model_changes_no_file_of_its_user(open_model_folder: Path, make: Make, lacks: Mapping[str, int]) -> None:
    file = make(as_nobody.NOBODY) / "file"
    program = [sys.executable, "-c", CHANGES_MODE, str(open_model_folder), str(file)]

    done = run(as_nobody.command(lesser_kernel.command(program, **lacks) if lacks else program))

    assert done.stdout.strip() in UNCHANGED, done.stderr
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.promise("Layers of the sandbox", "Without a filter for system calls, …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_processes_of_instances_that_share_a_user_have_something_else_that_ends_them(
    make: Make, open_model_folder: Path
) -> None:
    """Killing all processes of the user would end the other instances."""
    if closed_above(os.path.realpath(sys.base_prefix), SOMEBODY):
        pytest.skip("every interpreter here lies in a folder that is closed to others")
    if try_layer("cgroup").is_offered:
        pytest.skip("a cgroup ends them here")
    folder = make(FIRST_SHARED_USER)

    (why,) = shared(open_model_folder, folder, f"rw:{folder}", LACKS["namespaces"], syscalls="fork")

    assert "nothing here would end them" in why


@pytest.mark.promise("Layers of the sandbox", "If a grant cannot work, the …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_closed_folder_to_read_fails_the_load_too(make: Make, open_model_folder: Path) -> None:
    folder = make(SOMEBODY, 0o700)

    (why,) = shared(open_model_folder, folder, str(folder), LACKS["attributes"])

    assert cure(why) == ["chmod", "-R", "o+rX", str(folder)]
    subprocess.run(cure(why), check=True)
    assert shared(open_model_folder, folder, str(folder), LACKS["attributes"]) == [6, 6]


@pytest.mark.promise("Layers of the sandbox", "If a grant cannot work, the …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_folder_on_what_is_mounted_read_only_fails_the_load(make: Make, load: Load) -> None:
    folder = make(ROOT)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=755", "none", str(folder)], check=True)
    try:
        with pytest.raises(moonpool.LoadFailed, match="it is mounted read-only") as failed:
            load("writer", f"rw:{folder}")

        command = str(failed.value).partition("read-only: ")[2].partition(", or")[0]
        assert shlex.split(command) == ["mount", "-o", "remount,rw", str(folder)]
        assert load("reader", str(folder)).finds("files.listing", path=str(folder)) == 0
        subprocess.run(shlex.split(command), check=True)
        load("writer", f"rw:{folder}").finds("files.create", path=f"{folder}/new")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.promise("Layers of the sandbox", "If a grant cannot work, the …")
@pytest.mark.parametrize("grant", ["", "rw:"])
def test_a_folder_that_its_owner_closed_to_himself_fails_the_load(make: Make, load: Load, grant: str) -> None:
    folder = make(os.geteuid(), 0o500 if grant else 0o300)

    with pytest.raises(moonpool.LoadFailed, match="let its owner do so") as failed:
        load("closed", f"{grant}{folder}")

    subprocess.run(cure(str(failed.value)), check=True)
    assert load("closed", f"{grant}{folder}").finds("files.read", path=f"{folder}/file") == 6


@pytest.mark.promise("Layers of the sandbox", "If a grant cannot work, the …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
@pytest.mark.parametrize(("grant", "mode", "command"), [("", 0o700, "chmod -R o+rX"), ("rw:", 0o755, "chown -R 65534")])
def test_for_a_user_without_rights_too_the_load_fails_with_the_command(
    make: Make, open_model_folder: Path, grant: str, mode: int, command: str
) -> None:
    folder = make(SOMEBODY, mode)

    (why,) = shared(open_model_folder, folder, f"{grant}{folder}", is_nobody=True)

    assert "user 65534, which the runtime is, cannot" in why
    assert cure(why) == [*command.split(), str(folder)]
    subprocess.run(cure(why), check=True)
    found = shared(open_model_folder, folder, f"{grant}{folder}", is_nobody=True)
    assert found == ([5, 6] if grant else [6, 6])


@pytest.mark.promise("Layers of the sandbox", "If a grant cannot work, the …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_check_says_what_the_load_says(make: Make, tmp_path: Path) -> None:
    folder = make(ROOT)
    model = copied(tmp_path / "models" / "attacker")
    (model / "config.pbtxt").write_text(CONFIG.replace("GRANTED", f"rw:{folder}"))
    program = [sys.executable, "-m", "moonpool", "check", str(tmp_path / "models")]

    good = run(program)
    bad = run(lesser_kernel.command(program, **LACKS["attributes"]))

    assert (good.returncode, good.stdout.split(":")[0]) == (0, "ok"), good.stdout
    assert (bad.returncode, bad.stdout.split(":")[0]) == (1, "error"), bad.stdout
    assert f"chown -R {FIRST_SHARED_USER}:{FIRST_SHARED_USER} {folder}" in bad.stdout


@pytest.mark.promise("Layers of the sandbox", "If a grant cannot work, the …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
@pytest.mark.parametrize("path", ["rw:/proc", "rw:/sys", "rw:/dev", "rw:/dev/kmsg"])
def test_no_error_has_a_command_that_would_break_the_machine(load: Load, path: str) -> None:
    """Root pastes the command."""
    with pytest.raises(moonpool.LoadFailed) as caught:
        load("greedy", path)

    assert f"cannot {'write to' if path[3:] == '/dev/kmsg' else 'share'} {path[3:]}" in str(caught.value)
    assert " -R " not in str(caught.value)


IN_A_GROUP = """
import os, shlex, sys
from moonpool.stub.sandbox.granted import Granted, SandboxRefused
os.setgroups([4321])
os.setresgid(1234, 1234, 1234)
os.setresuid(1234, 1234, 1234)
try:
    Granted(sys.argv[1], None, writes=True).check()
except SandboxRefused as refused:
    print(refused)
"""


@pytest.mark.promise("Layers of the sandbox", "If a grant cannot work, the …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_folder_that_a_group_lets_pass_is_not_what_has_to_be_opened(make: Make) -> None:
    folder = make(ROOT, 0o750)
    os.chown(folder, ROOT, 4321)
    (folder / "inner").mkdir(mode=0o755)

    done = run([sys.executable, "-c", IN_A_GROUP, str(folder / "inner")])
    assert cure(done.stdout.strip()) == ["chown", "-R", "1234", str(folder / "inner")], done.stderr
