"""Outcomes if the kernel refuses a layer, and at levels with fewer layers."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tests.stub.sandbox.children import Identity

from moonpool.ipc.policy import BEST_EFFORT, OFF, STANDARD, STRICT
from moonpool.stub.sandbox import landlock

# The program first installs a filter, as a container does, in which these calls fail with that error.
HIDDEN = """
from moonpool.ipc import syscalls
from moonpool.stub.sandbox import identity, rules, seccomp
identity.forbid_new_privileges()
numbers = {{number: name for name, number in kernel.NUMBERS.items()}}
seen = dict.fromkeys(kernel.NUMBERS, ())
for name in {names!r}:
    del seen[name]
code = seccomp.program(syscalls.this_machine(), seen, (), {absent!r})
seccomp.install(code)
"""


def hide(*names: str, absent: bool = True) -> str:
    """Have these calls fail with ENOSYS, or else with EPERM."""
    return HIDDEN.format(names=names, absent=names if absent else ())


def names_of(results: dict[str, Any]) -> list[str]:
    return [layer.partition(":")[0] for layer in results["on"]]


@pytest.mark.promise(
    "Layers of the sandbox",
    "If the kernel refuses Landlock, seccomp or the limits, a model at `strict` does not "
    "load, and the error says which, why and what to do. At `best-effort` it loads, and "
    "the log says which were left out.",
)
def test_strict_does_not_start_without_landlock(identity: Identity) -> None:
    results = identity.attempt(identity.policy(), before=hide("landlock_create_ruleset"))

    assert results["refused"] == (
        "landlock: this kernel does not have it; use Linux 6.2 or later with landlock among its "
        "security modules (lsm=), or the level best-effort to go without"
    )


@pytest.mark.promise("Layers of the sandbox", "If the kernel refuses Landlock, seccomp …")
def test_best_effort_goes_without_landlock_and_says_so(identity: Identity) -> None:
    with identity.scratch() as scratch:
        policy = identity.policy(level=BEST_EFFORT, scratch=scratch, scratch_bytes=1 << 20)
        results = identity.attempt(
            policy,
            "open('/etc/passwd').read() and None",
            "os.fork()",
            before="import os\n" + hide("landlock_create_ruleset"),
        )

    assert "landlock" not in names_of(results)
    assert "seccomp" in names_of(results)
    assert any(sentence.startswith("landlock: ") for sentence in results["left_out"])
    assert results["open('/etc/passwd').read() and None"] == "ok None"
    assert results["os.fork()"].startswith("PermissionError")


@pytest.mark.promise("Layers of the sandbox", "If the kernel refuses Landlock, seccomp …")
@pytest.mark.parametrize("absent", [True, False])
def test_strict_does_not_start_without_seccomp(identity: Identity, absent: bool) -> None:
    # The missing call is the one that would install the filter.
    results = identity.attempt(identity.policy(), before=hide("seccomp", absent=absent))

    why = "Function not implemented" if absent else "Operation not permitted"
    assert results["refused"] == (f"seccomp: the kernel refused it ({why}); use the level best-effort to go without")


def test_best_effort_goes_without_seccomp_and_says_so(identity: Identity) -> None:
    results = identity.attempt(
        identity.policy(level=BEST_EFFORT), "open('/etc/passwd')", before=hide("seccomp", absent=False)
    )

    assert "landlock" in names_of(results)
    assert "seccomp" not in names_of(results)
    assert results["open('/etc/passwd')"].startswith("PermissionError")


@pytest.mark.promise("Layers of the sandbox", "The scratch folder is a private …")
@pytest.mark.promise(
    "Layers of the sandbox",
    "Namespaces are left out if they are forbidden. A Landlock that is too old for its task is refused.",
)
@pytest.mark.parametrize("level", [STRICT, BEST_EFFORT])
def test_namespaces_are_a_second_line_that_is_left_out_where_they_are_forbidden(identity: Identity, level: str) -> None:
    identity.needs_no_mounts()
    with identity.scratch() as scratch:
        policy = identity.policy(level=level, scratch=scratch, scratch_bytes=1 << 20)
        results = identity.attempt(
            policy,
            "open('/etc/passwd')",
            "socket.socket()",
            "os.chmod('/usr', 0)",
            "open('x', 'w').close()",
            before="import os, socket\n" + hide("unshare", absent=False),
        )
        left = os.listdir(scratch)

    assert not {"namespaces"} & set(names_of(results))
    assert {"landlock", "seccomp", "no_capabilities"} <= set(names_of(results))
    assert ("own_user" in names_of(results)) == identity.is_root
    missing = ["namespaces"] if identity.is_root else ["own_user", "namespaces"]
    assert [sentence.partition(":")[0] for sentence in results["left_out"]] == missing
    assert ("give the runtime CAP_SYS_ADMIN" in results["left_out"][-1]) == identity.is_root
    denied = ["open('/etc/passwd')", "socket.socket()", "os.chmod('/usr', 0)"]
    assert [each for each in denied if not results[each].startswith("PermissionError")] == []
    assert left == ["x"]


def test_a_granted_path_whose_mount_cannot_be_copied_is_named(identity: Identity) -> None:
    with identity.scratch() as folder:
        policy = identity.policy(granted=[(folder, True)])
        results = identity.attempt(policy, before=hide("open_tree", absent=False))

    assert f"namespaces: the kernel refused it at {folder} (" in results["left_out"][-1]


@pytest.mark.promise("Layers of the sandbox", "Namespaces are left out if they …")
def test_an_old_landlock_alone_is_not_enough_for_files_that_could_be_cut_short(identity: Identity) -> None:
    identity.needs_no_mounts()
    old = "from moonpool.stub.sandbox import landlock\nlandlock.abi = lambda: 2\n"

    results = identity.attempt(identity.policy(), before=old + hide("unshare", absent=False))

    if identity.is_root:
        assert "landlock:2" in results["on"]
    else:
        assert results["refused"].startswith("landlock: this kernel's does not keep files from")


@pytest.mark.parametrize("version", range(1, min(8, landlock.abi() + 1)))
def test_every_version_of_landlock_is_asked_for_what_it_knows(identity: Identity, version: int) -> None:
    old = f"from moonpool.stub.sandbox import landlock\nlandlock.abi = lambda: {version}\n"

    with identity.scratch() as scratch:
        policy = identity.policy(scratch=scratch, scratch_bytes=1 << 20)
        results = identity.attempt(policy, "open('/etc/passwd')", "open('x', 'w').write('x')", before=old)

    if "refused" in results:
        pytest.skip("no namespaces here, which an old version needs beside it")
    assert f"landlock:{version}" in results["on"]
    assert results["open('/etc/passwd')"].startswith("PermissionError")
    assert results["open('x', 'w').write('x')"] == "ok 1"


@pytest.mark.promise("Layers of the sandbox", "Namespaces are left out if they …")
def test_ports_are_not_granted_where_landlock_does_not_know_of_them(identity: Identity) -> None:
    old = "from moonpool.stub.sandbox import landlock\nlandlock.abi = lambda: 3\n"

    results = identity.attempt(identity.policy(ports=[443]), before=old)

    assert results["refused"] == (
        "landlock: this kernel's does not know of ports, of which some were granted; "
        "use Linux 6.7 or later, or grant none"
    )


@pytest.mark.promise("Layers of the sandbox", "If no private user is available, …")
@pytest.mark.parametrize(("version", "ports", "gap"), [(2, [], "from being cut short"), (3, [443], "know of ports")])
def test_best_effort_has_what_there_is_of_an_old_landlock(
    identity: Identity, version: int, ports: list[int], gap: str
) -> None:
    identity.needs_no_mounts()
    old = (
        f"from moonpool.stub.sandbox import identity, landlock\nlandlock.abi = lambda: {version}\n"
        "identity.may_change_user = lambda: False\n"
    )

    results = identity.attempt(
        identity.policy(level=BEST_EFFORT, ports=ports),
        "open('/etc/passwd')",
        before=old + hide("unshare", absent=False),
    )

    assert f"landlock:{version}" in results["on"]
    assert any(gap in each for each in results["left_out"] if each.startswith("landlock: "))
    assert results["open('/etc/passwd')"].startswith("PermissionError")


@pytest.mark.promise(
    "Layers of the sandbox",
    "If no private user is available, the log says so. A misspelled granted call is "
    "refused even at `best-effort`, which uses as much of an old Landlock as there is.",
)
def test_a_user_that_is_not_to_be_had_is_said(identity: Identity) -> None:
    results = identity.attempt(identity.policy(user=None))

    assert "own_user" not in names_of(results)
    assert results["left_out"][0].startswith("own_user: the runtime has none to give; run it as")


@pytest.mark.promise(
    "Layers of the sandbox",
    "A layer that `best-effort` left out is no error when layers are put on again, in forks and other interpreters.",
)
@pytest.mark.parametrize("level", [STRICT, BEST_EFFORT])
def test_layers_that_best_effort_left_out_are_not_required_later(identity: Identity, level: str) -> None:
    """The process that asks became another program, or was forked by a template."""
    again = f"layers.tighten(Policy(level={level!r}))"

    results = identity.attempt(
        identity.policy(level=BEST_EFFORT), again, before="from moonpool.ipc.policy import Policy\n" + hide("seccomp")
    )

    if level == STRICT:
        assert results[again].startswith("SandboxRefused seccomp: ")
    else:
        assert results[again] == "ok None"


@pytest.mark.promise("Layers of the sandbox", "A process that has threads before the layers are on is refused.")
def test_a_process_with_threads_is_not_confined_by_halves(identity: Identity) -> None:
    before = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"

    results = identity.attempt(identity.policy(), before=before)

    assert results["refused"] == (
        "landlock: this process has threads already, which it would not hold; "
        "look for what begins threads when Python starts (sitecustomize, .pth files)"
    )


def test_a_machine_whose_numbers_are_not_known_is_refused(identity: Identity) -> None:
    other = "from moonpool.ipc import syscalls\nsyscalls.this_machine = lambda: 'riscv64'\n"

    results = identity.attempt(identity.policy(), before=other)

    assert results["refused"] == (
        "seccomp: there is no filter for riscv64; use x86_64 or aarch64, or the level best-effort to go without"
    )


@pytest.mark.promise(
    "Layers of the sandbox", "At `standard`, files that a model makes have the modes of the runtime's umask."
)
def test_standard_keeps_what_a_trusted_model_needs(identity: Identity) -> None:
    results = identity.attempt(
        identity.policy(level=STANDARD),
        "open('/etc/passwd').read() and None",
        "os.waitpid(os.fork() or os._exit(0), 0)[1]",
        "resource.getrlimit(resource.RLIMIT_CORE)",
        "[line for line in open('/proc/self/status') if line.startswith('NoNewPrivs')]",
        "os.umask(0o027)",
        before="import os, resource; os.umask(0o022)",
    )

    assert results.pop("on") == ["dies_with_runtime", "no_core_dumps", "no_new_privs"]
    assert results.pop("left_out") == []
    assert list(results.values()) == ["ok None", "ok 0", "ok (0, 0)", r"ok ['NoNewPrivs:\t1\n']", "ok 18"]


def test_off_puts_on_nothing_but_limits_that_were_asked_for(identity: Identity) -> None:
    policy = identity.policy(level=OFF, limits={"open_files": 99})

    results = identity.attempt(policy, "resource.getrlimit(resource.RLIMIT_NOFILE)", before="import resource")

    assert results["on"] == ["dies_with_runtime", "limits"]
    assert results["resource.getrlimit(resource.RLIMIT_NOFILE)"] == "ok (99, 99)"


def test_limits_are_those_that_were_asked_for(identity: Identity) -> None:
    limits = {"memory_bytes": 3 << 30, "data_bytes": 2 << 30, "open_files": 77, "file_bytes": 4096, "tasks": 5}
    wanted = ["AS", "DATA", "NOFILE", "FSIZE", "NPROC", "CORE", "MSGQUEUE", "RTPRIO"]
    asked = f"[resource.getrlimit(getattr(resource, 'RLIMIT_' + each)) for each in {wanted}]"
    with identity.scratch() as scratch:
        policy = identity.policy(scratch=scratch, scratch_bytes=1 << 20, limits=limits, cpus=[0])
        results = identity.attempt(
            policy,
            asked.replace("'RLIMIT_' + each", "'RLIMIT_' + each, 12"),
            "open('x', 'wb', 0).write(bytes(8192)) and open('x', 'ab', 0).write(b'x')",
            "os.sched_getaffinity(0)",
            "threads()",
            before="import os, resource, threading, time\n"
            "def threads():\n"
            "    begun, wait = [], threading.Event()\n"
            "    try:\n"
            "        for _ in range(20):\n"
            "            begun.append(threading.Thread(target=wait.wait)); begun[-1].start()\n"
            "    finally:\n"
            "        wait.set()\n",
        )

    found = list(results.values())[2:]
    sizes = [3 << 30, 2 << 30, 77, 4096, 5, 0, 0, 0]
    assert found[0] == f"ok {[(size, size) for size in sizes]}"
    assert found[1] == "OSError [Errno 27] File too large"
    assert found[2] == "ok {0}"
    assert found[3] == "RuntimeError can't start new thread"


@pytest.mark.promise("Layers of the sandbox", "If the kernel refuses Landlock, seccomp …")
def test_processors_that_are_not_there_are_refused(identity: Identity) -> None:
    results = identity.attempt(identity.policy(cpus=[4095]))

    assert results["refused"].startswith("limits: processors 4095 were refused (")
