"""The mounts of a contained process: its scratch folder, and files below folders that are closed to its user."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stub.sandbox.children import INSTANCE, Identity

from moonpool.stub.sandbox import landlock
from moonpool.stub.sandbox.granted import closed_above
from moonpool.stub.sandbox.mounts import make_place

if landlock.abi() < landlock.KNOWS_TRUNCATE:
    pytest.skip("this kernel has no Landlock, or an old one", allow_module_level=True)


def needs_mounts(results: dict[str, object]) -> None:
    if not any("mnt" in layer for layer in results["on"]):  # type: ignore[attr-defined]
        pytest.skip("no namespaces for mounts here")


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that only its owner can pass, with a file and a folder in it that all may read."""
    with tempfile.TemporaryDirectory(prefix="moonpool-test-") as name:
        path = Path(os.path.realpath(name))
        (path / "a" / "model").mkdir(parents=True)
        (path / "a" / "model" / "file").write_text("content")
        (path / "a" / "secret").write_text("secret")
        (path / "one").write_text("one")
        path.chmod(0o700)
        yield path


def test_the_topmost_closed_folder_is_found(closed: Path) -> None:
    assert closed_above(str(closed / "a" / "model"), INSTANCE) == str(closed)
    assert closed_above(str(closed), INSTANCE) == ""
    assert closed_above("/usr/bin", INSTANCE) == ""
    assert closed_above(str(closed / "a"), os.geteuid()) == ""


@pytest.mark.promise(
    "Layers of the sandbox",
    "With a private user, an instance reaches needed files below closed folders at their "
    "places, and nothing beside them. If it cannot read a file, the error names the file "
    "and the command that opens it.",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_granted_paths_below_a_closed_folder_are_reached(code: Path, closed: Path) -> None:
    identity = Identity(0, sys.executable, code)
    scratch = closed / "scratch"
    scratch.mkdir()
    policy = identity.policy(
        read=[str(closed / "a" / "model"), str(closed / "one")], scratch=str(scratch), scratch_bytes=1 << 20
    )
    results = identity.attempt(
        policy,
        f"open('{closed}/a/model/file').read()",
        f"open('{closed}/one').read()",
        f"open('{closed}/scratch/new', 'w').write('x')",
        f"os.path.exists('{closed}/a/secret')",
        f"os.listdir('{closed}')",
        before="import os",
    )
    needs_mounts(results)
    found = list(results.values())[2:]

    assert found[:4] == ["ok 'content'", "ok 'one'", "ok 1", "ok False"]
    assert found[4].startswith("PermissionError")
    assert list(scratch.iterdir()) == []
    assert (closed / "a" / "secret").exists()


@pytest.mark.promise("Layers of the sandbox", "With a private user, an instance …")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_file_that_its_user_cannot_read_is_named_with_what_to_do(code: Path, closed: Path) -> None:
    identity = Identity(0, sys.executable, code)
    (closed / "one").chmod(0o600)

    results = identity.attempt(identity.policy(read=[str(closed / "one")]))

    assert results["refused"] == (
        f"files: user {INSTANCE}, which this instance is, cannot read {closed}/one; "
        f"let others read it (chmod -R o+rX {closed}/one), and pass the folders above it"
    )


@pytest.mark.promise(
    "Layers of the sandbox",
    "The scratch folder is a private file system with a limit of size and files, and ends "
    "with the process. Without mounts it is a plain folder.",
)
def test_scratch_has_its_size_and_nobody_else_sees_it(identity: Identity) -> None:
    with identity.scratch() as scratch:
        policy = identity.policy(scratch=scratch, scratch_bytes=1 << 20)
        results = identity.attempt(
            policy,
            "os.getcwd()",
            "open('small', 'wb').write(bytes(1 << 19))",
            "open('large', 'wb').write(bytes(1 << 20))",
            "for i in range(2000): open(f'f{i}', 'w').close()",
            "oct(os.stat('.').st_mode)",
            before="import os",
        )
        needs_mounts(results)
        left = os.listdir(scratch)
    found = list(results.values())[2:]

    assert found[:2] == [f"ok {scratch!r}", "ok 524288"]
    assert found[2] == "OSError [Errno 28] No space left on device"
    assert found[3].startswith("OSError [Errno 28]")
    assert found[4] == "ok '0o40700'"
    assert left == []


@pytest.mark.promise("Layers of the sandbox", "An instance may change modes, owners, …")
def test_everything_but_what_it_may_write_is_read_only(identity: Identity) -> None:
    with identity.scratch() as scratch, identity.scratch() as shared:
        policy = identity.policy(granted=[(shared, True)], scratch=scratch, scratch_bytes=1 << 20)
        results = identity.attempt(
            policy,
            "os.statvfs('/usr').f_flag & os.ST_RDONLY",
            "os.statvfs('/tmp').f_flag & os.ST_RDONLY",
            "os.statvfs('.').f_flag & os.ST_RDONLY",
            f"os.statvfs({shared!r}).f_flag & os.ST_RDONLY",
            f"open({shared!r} + '/x', 'w').close()",
            before="import os",
        )
        needs_mounts(results)
        left = os.listdir(shared)

    assert list(results.values())[2:] == ["ok 1", "ok 1", "ok 0", "ok 0", "ok None"]
    assert left == ["x"]


@pytest.mark.promise(
    "Layers of the sandbox", "A read-only mount below a folder that is granted for writing stays read-only."
)
def test_a_read_only_mount_below_a_granted_folder_stays_read_only(identity: Identity) -> None:
    with identity.scratch() as shared:
        inner = f"{shared}/inner"
        results = identity.attempt(
            identity.policy(granted=[(shared, True)]),
            f"os.statvfs('{shared}').f_flag & os.ST_RDONLY",
            f"os.statvfs('{inner}').f_flag & os.ST_RDONLY",
            f"open('{inner}/x', 'w')",
            before=MOUNTED.format(inner=inner),
        )
        needs_mounts(results)

    assert list(results.values())[2:4] == ["ok 0", "ok 1"]
    assert results[f"open('{inner}/x', 'w')"].startswith("OSError [Errno 30]")


# The container gives its processes a folder that they may not write to.
MOUNTED = """
import os
from moonpool.stub.sandbox import mounts, namespaces
namespaces.enter(network=True)
mounts.mount("none", "/", "", mounts._REC | mounts._PRIVATE)
os.mkdir({inner!r})
mounts.mount("tmpfs", {inner!r}, "tmpfs", 0, "mode=0777")
mounts.mount("none", {inner!r}, "", 32 | mounts._BIND | mounts._RDONLY)  # MS_REMOUNT
"""


# Another model that may write to the folder above puts a link there, after the stub has looked.
SWAPPED = """
import os
from moonpool.stub.sandbox import mounts
make_read_only = mounts._forbid_writing
def swap():
    os.rename({inner!r}, {inner!r} + ".moved")
    os.symlink({secret!r}, {inner!r})
    return make_read_only()
mounts._forbid_writing = swap
"""


@pytest.mark.promise("Layers of the sandbox", "A granted path is no link …")
@pytest.mark.parametrize("writes", [False, True])
def test_a_link_that_comes_to_a_granted_path_while_mounts_are_made_is_not_followed(
    identity: Identity, writes: bool
) -> None:
    with identity.scratch() as shared, identity.scratch() as secret:
        inner = f"{shared}/inner"
        os.mkdir(inner)
        os.chown(inner, os.stat(shared).st_uid, -1)
        policy = identity.policy(granted=[(inner, writes)])
        results = identity.attempt(policy, before=SWAPPED.format(inner=inner, secret=secret))
        if "refused" not in results:
            needs_mounts(results)

    assert "is a link or lies behind one" in results["refused"]


def test_the_place_of_a_file_is_made_through_no_link(tmp_path: Path) -> None:
    """Another process that may write to the folder can put a link there after the file was opened."""
    file, place = tmp_path / "file", tmp_path / "place"
    file.touch()
    place.symlink_to(tmp_path / "elsewhere")
    fd = os.open(file, os.O_PATH)
    try:
        with pytest.raises(FileExistsError):
            make_place(str(place), fd)
    finally:
        os.close(fd)
    assert not (tmp_path / "elsewhere").exists()
