"""Libraries that models are made of, imported and used inside the sandbox."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.stub.sandbox.children import NOBODY, Identity

from moonpool.stub.sandbox import landlock
from moonpool.stub.sandbox.granted import closed_above

pytestmark = pytest.mark.promise("Layers of the sandbox", "In the sandbox, threads, asyncio …")

if landlock.abi() < landlock.KNOWS_TRUNCATE:
    pytest.skip("this kernel has no Landlock, or an old one", allow_module_level=True)


def used(identity: Identity, library: str, *uses: str, syscalls: Sequence[str] = ()) -> list[str]:
    """Import a library of this interpreter's inside the sandbox and use it; what came of each."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        pytest.skip(f"{library} is not installed")
    packages = os.path.realpath(Path(spec.origin).parent.parent)
    own = sys.executable
    if identity.uid == NOBODY and closed_above(os.path.realpath(own), NOBODY):
        pytest.skip(f"{own} is closed to user {NOBODY}")
    here = Identity(identity.uid, own, identity.folder)
    limits = {"memory_bytes": 6 << 30, "tasks": 64, "open_files": 256}
    with identity.scratch() as scratch:
        policy = here.policy(read=[packages], scratch=scratch, scratch_bytes=1 << 24, limits=limits, syscalls=syscalls)
        before = (
            f"import os, sys; sys.path[:0] = [{packages!r}]; os.environ['HOME'] = {scratch!r}; "
            f"os.environ['TMPDIR'] = {scratch!r}"
        )
        results = here.attempt(policy, f"import {library}", *uses, before=before)
    assert "seccomp" in results["on"]
    return [results[each] for each in (f"import {library}", *uses)]


def test_numpy_computes(identity: Identity) -> None:
    results = used(
        identity,
        "numpy",
        "float((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum())",
        "numpy.linalg.solve(numpy.eye(3), numpy.ones(3)).tolist()",
        "numpy.random.default_rng(1).random(3).shape",
        "numpy.save('a.npy', numpy.arange(5)); numpy.load('a.npy', mmap_mode='r')[3]",
        "int(numpy.load('a.npy', mmap_mode='r')[3])",
    )

    assert results == ["ok None", "ok 27000000.0", "ok [1.0, 1.0, 1.0]", "ok (3,)", "ok None", "ok 3"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_torch_computes(identity: Identity) -> None:
    results = used(
        identity,
        "torch",
        "list(torch.nn.Conv2d(3, 8, 3)(torch.rand(2, 3, 32, 32)).shape)",
        "torch.set_num_threads(2); torch.rand(500, 500) @ torch.rand(500, 500)",
        "torch.save({'a': torch.ones(2)}, 'a.pt')",
        "torch.load('a.pt')['a'].tolist()",
        "list(torch.jit.script(torch.nn.Linear(2, 3))(torch.ones(1, 2)).shape)",
        "next(iter(torch.utils.data.DataLoader(range(3)))).tolist()",
    )

    assert results == ["ok None", "ok [2, 8, 30, 30]", "ok None", "ok None", "ok [1.0, 1.0]", "ok [1, 3]", "ok [0]"]


def test_asyncio_and_sqlite_work_as_well(identity: Identity) -> None:
    results = used(
        identity,
        "asyncio",
        "asyncio.run(asyncio.wait_for(asyncio.to_thread(sum, [1, 2]), 5))",
        "import sqlite3; sqlite3.connect('file:a.db?nolock=1', uri=True).execute('create table t (x)')",
    )

    assert results == ["ok None", "ok 3", "ok None"]


@pytest.mark.promise(
    "Layers of the sandbox",
    "Locks on parts of files are granted as `locks`. A model whose files no other process may write to has them "
    "without a grant, and without a lock in the kernel. Others are refused them.",
)
def test_sqlite_locks_its_files_where_nobody_else_writes_or_that_is_granted(identity: Identity) -> None:
    uses = [
        "import sqlite3; a = sqlite3.connect('a.db'); a.execute('create table t (x)'); a.commit()",
        "sqlite3.connect('b.db').execute('pragma journal_mode=wal').fetchone()[0]",
        "b = sqlite3.connect('b.db'); b.execute('create table t (x)'); b.execute('insert into t values (7)'); "
        "b.commit()",
        "sqlite3.connect('b.db').execute('select x from t').fetchone()[0]",
    ]

    _, *alone = used(identity, "sqlite3", *uses)
    # Its processes may write to each other's files.
    _, *refused = used(identity, "sqlite3", *uses, syscalls=["fork"])
    _, *granted = used(identity, "sqlite3", *uses, syscalls=["fork", "locks"])

    assert alone == granted == ["ok None", "ok 'wal'", "ok None", "ok 7"]
    assert "OperationalError" in refused[0]
