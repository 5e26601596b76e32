"""Processes that put a sandbox on and then try things, as root and as a user without rights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool.ipc.policy import STRICT, Policy
from moonpool.stub.sandbox.granted import closed_above

NOBODY = 65534
# Instances get users such as this one.
INSTANCE = 61183

_PROGRAM = """
import sys
folder, policy, before, attempts = sys.argv[1:]
import json, os, types
package = sys.modules["moonpool"] = types.ModuleType("moonpool")
package.__path__ = [folder]
from moonpool.ipc.policy import Policy
from moonpool.stub.sandbox import kernel, layers
from moonpool.stub.sandbox.outcome import SandboxRefused
policy = Policy.from_json(policy)
names = {"__name__": "__main__", "kernel": kernel, "layers": layers, "policy": policy}
exec(before, names)
try:
    applied = layers.apply(policy)
except SandboxRefused as refused:
    print(json.dumps({"refused": str(refused)}))
    sys.exit()
results = {"on": applied.on, "left_out": applied.left_out}
for attempt in json.loads(attempts):
    try:
        try:
            found = eval(attempt, names)
        except SyntaxError:
            found = exec(attempt, names)
        results[attempt] = f"ok {found!r}"
    except Exception as error:
        results[attempt] = f"{type(error).__name__} {error}"
print(json.dumps(results))
"""


class Identity:
    """The user of a test's processes, root or one without rights, with an interpreter that it can reach."""

    def __init__(self, uid: int, python: str, folder: Path) -> None:
        self.uid = uid
        self.python = python
        # This folder has a copy of the stub's code and nothing else, and all users can read it.
        self.folder = folder

    @property
    def is_root(self) -> bool:
        return self.uid == 0

    @contextmanager
    def scratch(self) -> Iterator[str]:
        """A folder of its own."""
        path = os.path.realpath(tempfile.mkdtemp(prefix="moonpool-test-"))
        try:
            owner = INSTANCE if self.is_root else self.uid
            if os.geteuid() == 0:
                os.chown(path, owner, owner)
            yield path
        finally:
            shutil.rmtree(path)

    def policy(self, **options: Any) -> Policy:
        """Return the policy of a strict instance with an interpreter and without a model."""
        libraries = ["/usr", "/lib", "/lib64", os.path.realpath(os.path.dirname(self.python))]
        prefixes = _prefixes(self.python)
        paths = {os.path.realpath(path) for path in [*libraries, *prefixes, str(self.folder)]}
        options.setdefault("level", STRICT)
        options.setdefault("user", INSTANCE if self.is_root else None)
        read = [*sorted(path for path in paths if os.path.exists(path)), *options.pop("read", [])]
        return Policy(read=read, **options)

    def needs_no_mounts(self) -> None:
        """Skip the test where the instance's user could not reach its interpreter without mounts."""
        if self.is_root and closed_above(os.path.realpath(self.python), INSTANCE):
            pytest.skip("every interpreter here lies in a folder that is closed to others")

    def run(
        self, program: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end as this user."""
        prefix = []
        if self.uid != os.geteuid():
            user = str(self.uid)
            prefix = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
        return subprocess.run(
            [*prefix, self.python, "-I", "-S", "-c", program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PATH": os.defpath, **(environment or {})},
            timeout=170,
        )

    def attempt(self, policy: Policy, *attempts: str, before: str = "") -> dict[str, Any]:
        """Put the sandbox on and try each; returns what came of it, `refused` where it was not put on."""
        ended = self.run(_PROGRAM, str(self.folder), policy.to_json(), before, json.dumps(attempts))
        if ended.returncode:
            pytest.fail(f"it ended with {ended.returncode}\n{ended.stderr}", pytrace=False)
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return found


def _prefixes(python: str) -> list[str]:
    if python == sys.executable:
        return [sys.prefix, sys.base_prefix]
    return ["/usr"]


def identities() -> list[int]:
    """Whom this test process can be: itself and, if it is root, a user without rights."""
    return [0, NOBODY] if os.geteuid() == 0 else [os.geteuid()]


def python_for(uid: int) -> str:
    """An interpreter that the user, or the one that root becomes, can reach. Skips the test where there is none."""
    reader = INSTANCE if uid == 0 else uid
    for python in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(python) and not closed_above(os.path.realpath(python), reader):
            return python
    if uid == 0:
        return sys.executable
    pytest.skip(f"no interpreter here is open to user {uid}")


@contextmanager
def open_copy() -> Iterator[Path]:
    """A copy of what runs in a stub at a place that everybody can reach."""
    with tempfile.TemporaryDirectory(prefix="moonpool-test-code-") as name:
        folder = Path(os.path.realpath(name))
        folder.chmod(0o755)
        package = Path(next(iter(moonpool.__path__)))
        for part in ("ipc", "stub"):
            source = (package / part).resolve()
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        yield folder
