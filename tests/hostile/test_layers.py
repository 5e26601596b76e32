"""The sandbox itself: that it is on, in time, and never silently weaker."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests import lesser_kernel
from tests.e2e.hosting import Config, options
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import SIGNATURE, copied, load_attacker
from tests.hostile.conftest import Attackers

import moonpool
from moonpool import LoadFailed
from moonpool.runtime.isolation import users
from moonpool.stub.sandbox.granted import closed_above

REQUIRED = {"limits", "no_new_privs", "landlock", "seccomp"}


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.promise(
    "The sandbox: `strict`",
    "The layers are on before any code of the model runs. The runtime compares them with what "
    "the kernel reports. If the runtime is root, each instance is a user of its own.",
)
def test_the_kernel_says_of_a_strict_model_what_it_says_of_itself(
    runtime: moonpool.Runtime, attackers: Attackers, is_root: bool
) -> None:
    attacker = attackers("strict")
    told = runtime.instances(attacker.name)[0]["sandbox"]
    seen = status(attacker.pid)

    assert isinstance(told, dict)
    assert {layer.partition(":")[0] for layer in told["layers"]} >= REQUIRED
    assert (seen["NoNewPrivs"], seen["Seccomp"]) == ("1", "2")
    assert {seen[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    if is_root:
        # No other process has this user.
        assert told["user"] == int(seen["Uid"].split()[0]) != 0
        assert seen["Groups"] == ""
        assert seen["CapBnd"] == "0" * 16
    # The model itself sees the same.
    within = attacker.finds("self.status")
    assert (within["NoNewPrivs"], within["Seccomp"]) == ("1", "2")


@pytest.mark.promise("The sandbox: `strict`", "The layers are …")
def test_two_instances_are_two_users(
    runtime: moonpool.Runtime, attackers: Attackers, model_folder: Path, is_root: bool
) -> None:
    if not is_root:
        pytest.skip("only root has users to give")
    other = load_attacker(runtime, "strict", model_folder, "another")
    try:
        ours = attackers("strict").finds("self.identity")
        theirs = other.finds("self.identity")
    finally:
        runtime.unload("another")

    assert ours["uids"] != theirs["uids"]
    assert len(set(ours["uids"] + ours["gids"])) == 1
    assert ours["groups"] in ([], ours["gids"][:1])


@pytest.mark.promise(
    "The sandbox: `standard`", "A model gains no privileges by running a program, and leaves no core file."
)
def test_at_standard_a_model_gets_no_privileges_and_leaves_no_core(attackers: Attackers) -> None:
    seen = status(attackers("standard").pid)

    assert seen["NoNewPrivs"] == "1"
    assert attackers("standard").finds("self.limit", name="RLIMIT_CORE") == [0, 0]


# Kernels that lack something

PROGRAM = """
import json, sys
from pathlib import Path
import moonpool
from tests.hostile.attacker import answers, load_attacker, load_sibling
with moonpool.Runtime() as runtime:
    load_sibling(runtime)
    try:
        attacker = load_attacker(runtime, sys.argv[1], Path(sys.argv[2]))
    except moonpool.LoadFailed as error:
        print(json.dumps({"failed": str(error), "stage": error.stage, "sibling": answers(runtime)}))
    else:
        said = attacker.finds("kernel.make", name="getpid") == attacker.pid
        found = runtime.instances(attacker.name)[0]["sandbox"]
        print(json.dumps(found | {"serves": said, "sibling": answers(runtime)}))
"""


# The program drops the capabilities from CAP_CHOWN to CAP_SETUID (PR_CAPBSET_DROP).
WITHOUT_CAPABILITIES = """
import os, sys
from moonpool.stub.sandbox import kernel
for capability in range(8):
    kernel.prctl(24, capability)
os.execv(sys.argv[1], sys.argv[1:])
"""


def loaded(
    level: str, folder: Path, refusals: Mapping[str, int] | None = None, *, has_capabilities: bool = True
) -> dict[str, Any]:
    """Load the attacker at this level in a runtime whose kernel refuses these calls, and return its report."""
    paths = [str(Path(__file__).parents[2]), *sys.path]
    program = [sys.executable, "-c", PROGRAM, level, str(folder)]
    if not has_capabilities:
        program = [sys.executable, "-c", WITHOUT_CAPABILITIES, *program]
    ended = subprocess.run(
        lesser_kernel.command(program, **(refusals or {})),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        pytest.fail(ended.stderr, pytrace=False)
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["sibling"] is True
    return found


MISSING = {"landlock": {"landlock_create_ruleset": errno.ENOSYS}, "seccomp": {"seccomp": errno.EINVAL}}


@pytest.mark.promise(
    "The sandbox: `strict`",
    "It is never silently weaker. Without Landlock or seccomp nothing loads. At `best-effort`, "
    "and for namespaces and private users, the log says what is missing.",
)
@pytest.mark.parametrize("layer", MISSING)
def test_without_a_layer_that_it_needs_strict_does_not_load(model_folder: Path, layer: str) -> None:
    found = loaded("strict", model_folder, MISSING[layer])

    assert f"{layer}: " in found["failed"]
    assert "best-effort" in found["failed"]


@pytest.mark.promise("The sandbox: `strict`", "It is never …")
def test_best_effort_goes_without_and_says_so(model_folder: Path, is_root: bool) -> None:
    found = loaded("best-effort", model_folder, MISSING["landlock"])

    assert found["serves"]
    missing = ["landlock"] if is_root else ["own_user", "landlock"]
    assert [each.partition(":")[0] for each in found["left_out"]] == missing
    assert "landlock" not in " ".join(found["layers"])
    assert {"seccomp", "no_new_privs"} <= set(found["layers"])


@pytest.mark.promise("The sandbox: `strict`", "It is never …")
def test_strict_goes_without_namespaces_and_says_so(is_root: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="moonpool-hostile-") as name:
        # Without mounts of its own, an instance's user cannot pass a closed folder.
        Path(name).chmod(0o755)
        found = loaded("strict", copied(Path(name) / "attacker"), {"unshare": errno.EPERM})

    if is_root and closed_above(os.path.realpath(sys.base_prefix), users.LAST):
        assert "which this instance is, cannot read" in found["failed"]
        assert "chmod" in found["failed"]
    else:
        assert found["serves"]
        assert any(each.startswith("namespaces: ") for each in found["left_out"])


@pytest.mark.promise("The sandbox: `strict`", "It is never …")
def test_a_root_without_rights_has_no_users_to_give_and_serves(model_folder: Path, is_root: bool) -> None:
    """Some containers take these rights from root."""
    if not is_root:
        pytest.skip("this user has none to lose")
    found = loaded("strict", model_folder, has_capabilities=False)

    assert found["serves"]
    assert found["user"] is None
    assert any(each.startswith("own_user: ") for each in found["left_out"])
    assert {"landlock", "seccomp"} <= {layer.partition(":")[0] for layer in found["layers"]}


# Code that would run before the sandbox is on

MARKED = """
import os, sys
try:
    with open({marker!r}, "a") as file:
        file.write("ran")
except OSError:
    pass
{rest}
"""
HIJACKED = ["_ctypes", "ctypes", "json", "msgpack", "resource", "sitecustomize", "struct", "usercustomize"]


@pytest.fixture
def hijacking(model_folder: Path, tmp_path: Path) -> Callable[[], bool]:
    """A model whose folder has modules of names that the stub imports itself; whether any of them ran."""
    marker = tmp_path / "ran"
    version = tmp_path / "hijacking" / "1"
    shutil.copytree(model_folder / "1", version)
    for name in HIJACKED:
        (version / f"{name}.py").write_text(MARKED.format(marker=str(marker), rest=""))
        (version.parent / f"{name}.py").write_text(MARKED.format(marker=str(marker), rest=""))
    (version / "evil.pth").write_text(f"import os; open({str(marker)!r}, 'w')\n")
    return marker.exists


@pytest.mark.promise(
    "The sandbox: `standard`", "Files in a model's directory cannot replace modules that its process imports before it."
)
def test_files_of_a_model_hide_nothing_that_its_process_imports_first(
    runtime: moonpool.Runtime, hijacking: Callable[[], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The runtime's working directory is not on the path either.
    monkeypatch.chdir(tmp_path / "hijacking" / "1")
    attacker = load_attacker(runtime, "standard", tmp_path / "hijacking", "hijacking")
    try:
        assert attacker.finds("kernel.make", name="getpid") == attacker.pid
        assert not hijacking()
        assert str(tmp_path / "hijacking" / "1") not in sys.path
    finally:
        runtime.unload("hijacking")


@pytest.mark.promise("The sandbox: `strict`", "The layers are …")
def test_a_thread_that_was_there_before_the_sandbox_fails_the_load(
    runtime: moonpool.Runtime, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Landlock would not hold it."""
    tmp_path.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)

    with pytest.raises(LoadFailed, match="landlock: this process has threads already"):
        load_attacker(runtime, "strict", model_folder, "threaded")


FOREIGN = """#!{python}
import errno, os, socket
found = []
for attempt in (lambda: open("/etc/passwd"), os.fork, socket.socket, lambda: os.kill(os.getppid(), 0)):
    try:
        attempt()
        found.append("done")
    except OSError as error:
        found.append(errno.errorcode[error.errno])
print("it tried:", *found, flush=True)
os._exit(1)
"""


@pytest.mark.promise("The sandbox: grants", "An interpreter that a model brings is confined before it begins.")
@pytest.mark.parametrize("level", ["off", "strict"])
def test_an_interpreter_that_a_model_brings_is_confined_before_it_begins(
    runtime: moonpool.Runtime, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FOREIGN.format(python=os.path.realpath(sys.executable)))
    for path in (python, python.parent, python.parent.parent, tmp_path):
        path.chmod(0o755)
    config: Config = SIGNATURE | options(SANDBOX=level)
    config["parameters"]["EXECUTION_ENV_PATH"] = {"string_value": str(python.parent.parent)}

    with caplog.at_level(logging.DEBUG, "moonpool.stub"), pytest.raises(LoadFailed):
        runtime.load("foreign", model_folder, config=config)

    refused = "EACCES EPERM EPERM EPERM" if level == "strict" else "done done done done"
    assert f"it tried: {refused}" in caplog.text
