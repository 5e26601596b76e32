"""Acts of a model on its runtime and its siblings, and attempts to start processes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import answers
from tests.hostile.attempts import Attempt, made
from tests.hostile.conftest import Attackers

import moonpool

SECRET = "the runtime's own secret"
PARENT = {"pid": "$parent"}
SIBLING = {"pid": "$sibling"}
MEMORY = {"pid": "$parent", "address": "$address", "size": len(SECRET)}

ATTEMPTS = {
    "a signal to the runtime": Attempt("processes.signal_to", PARENT),
    "a signal to a sibling": Attempt("processes.signal_to", SIBLING),
    "a signal to the runtime's group": Attempt("processes.signal_to_group", PARENT),
    "a signal to the runtime's thread": Attempt("processes.signal_to_thread", PARENT),
    "a signal to all": Attempt("processes.signal_to", {"pid": -1}),
    "a signal with a value": Attempt("processes.signal_with_value", PARENT),
    "a signal by a descriptor": Attempt("processes.signal_by_descriptor", PARENT),
    "a signal by the owner of a pipe": Attempt("processes.signal_by_ownership", PARENT),
    "tracing the runtime": Attempt("processes.trace", PARENT),
    "tracing a sibling": Attempt("processes.trace", SIBLING),
    "the runtime's memory by a call": Attempt("processes.read_memory", MEMORY),
    "the runtime's memory by its file": Attempt("processes.read_memory_file", MEMORY),
    "writing the runtime's memory": Attempt(
        "processes.write_memory", {"pid": "$parent", "address": "$address", "text": SECRET}
    ),
    "a descriptor of the runtime": Attempt("processes.take_descriptor", {"pid": "$parent", "fd": "$fd"}),
    "a descriptor of the runtime by its path": Attempt(
        "processes.take_descriptor_by_path", {"pid": "$parent", "fd": "$fd"}
    ),
    "the runtime's environment": Attempt("processes.read_environment", PARENT),
    "a sibling's environment": Attempt("processes.read_environment", SIBLING),
    "the runtime's command line": Attempt("processes.read_of_process", PARENT | {"name": "cmdline"}),
    "the runtime's maps": Attempt("processes.read_of_process", PARENT | {"name": "maps"}),
    "the runtime's status": Attempt("processes.read_of_process", PARENT | {"name": "status"}),
    "the runtime's descriptors": Attempt("processes.list_of_process", PARENT | {"name": "fd"}),
    "the runtime's working directory": Attempt("processes.list_of_process", PARENT | {"name": "cwd"}),
    "all processes": Attempt("processes.list_processes"),
    "comparing with the runtime": Attempt("processes.compare", PARENT),
    "a limit of the runtime": Attempt("processes.limit", PARENT),
    "what limit the runtime has": Attempt("processes.read_limit", PARENT),
    "the runtime's priority": Attempt("processes.slow_down", PARENT),
    "a sibling's priority": Attempt("processes.slow_down", SIBLING),
    "a better priority": Attempt("processes.hurry", off=()),
    "the runtime's scheduling": Attempt("processes.schedule", SIBLING),
    "a sibling's place at the disk": Attempt("processes.prioritise_io", SIBLING),
    "a fork": Attempt("processes.fork"),
    "a fork of a fork": Attempt("processes.fork_twice"),
    "a vfork": Attempt("processes.vfork"),
    "a spawn": Attempt("processes.spawn"),
    "a clone that is no thread": Attempt("processes.clone_without_thread"),
    "a clone3 that is no thread": Attempt("processes.clone3_process", strict=("ENOSYS", "EPERM", "killed")),
    "another program": Attempt("processes.execute_program", off=()),
    "a program of memory": Attempt("processes.execute_memory", off=()),
    "root": Attempt("processes.become_root", off=()),
    "another user": Attempt("processes.become_another", off=()),
    "groups": Attempt("processes.set_groups", off=()),
    "capabilities": Attempt("processes.take_capabilities", off=()),
}


@pytest.fixture(scope="module")
def scene(runtime: moonpool.Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The runtime is this very process."""
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    buffer = ctypes.create_string_buffer(SECRET.encode())
    with file.open() as opened:
        yield {
            "parent": os.getpid(),
            "sibling": runtime.instances("sibling")[0]["pid"],
            "address": ctypes.addressof(buffer),
            "fd": opened.fileno(),
        }


@pytest.mark.promise(
    "The sandbox: `strict`",
    "It starts no process and no program, neither by `fork`, `vfork`, `clone`, `clone3` or "
    "`exec` nor from memory. It may start threads, up to a limit.",
)
@pytest.mark.promise(
    "The sandbox: `strict`",
    "Of other processes, its runtime included, it can read no memory, environment, descriptor or "
    "command line, trace none, signal none, and change no limit, priority or processor.",
)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_nothing_of_other_processes_is_within_reach(attackers: Attackers, scene: dict[str, Any], attempt: str) -> None:
    outcome = made(attackers("strict"), ATTEMPTS[attempt], scene)

    assert outcome.word in ATTEMPTS[attempt].strict, outcome


# These calls tell whether a process of a number exists.
QUESTIONS = [
    "getpgid",
    "getsid",
    "getpriority",
    "sched_getaffinity",
    "sched_getscheduler",
    "sched_getparam",
    "sched_getattr",
    "sched_rr_get_interval",
    "ioprio_get",
    "prlimit64",
    "get_robust_list",
    "capget",
    "clock_gettime",
    "clock_getres",
    "timer_create",
    "kill",
    "tgkill",
    "pidfd_open",
    "move_pages",
    "migrate_pages",
    "setpgid",
    "sched_setaffinity",
]
# libc asks these with the number of a thread. All numbers get the same answer.
ANSWERED = {"sched_getaffinity", "sched_getscheduler", "sched_getparam", "sched_setaffinity"}
# At `off`, these give this user the same error for every number, because the user may not ask.
FOR_OWNERS = {"move_pages", "migrate_pages", "setpgid", "get_robust_list"}


def nobody_s_pid() -> int:
    """A number that no process has."""
    highest = int(Path("/proc/sys/kernel/pid_max").read_text())
    return next(pid for pid in range(highest - 1, 1, -1) if not Path(f"/proc/{pid}").exists())


@pytest.mark.promise(
    "The sandbox: `strict`", "No call tells it whether a process with a given number exists. It may ask about itself."
)
@pytest.mark.promise("Layers of the sandbox", "A process may name only itself …")
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_model_learns_of_no_number_whether_it_is_a_process(
    attackers: Attackers, scene: dict[str, Any], question: str
) -> None:
    pids = [1, scene["parent"], scene["sibling"], nobody_s_pid()]

    outcome = attackers("strict").tries("processes.ask_about", question=question, pids=pids)

    if question in ANSWERED:
        assert outcome.done == ["done"] * len(pids)
    elif outcome.word != "killed":
        assert set(outcome.done) <= {"EPERM"} or set(outcome.done) <= {"ENOSYS"}, outcome


@pytest.mark.parametrize("question", [each for each in QUESTIONS if each not in FOR_OWNERS])
def test_without_a_sandbox_a_model_learns_it(attackers: Attackers, scene: dict[str, Any], question: str) -> None:
    pids = [scene["sibling"], nobody_s_pid()]

    there, absent = attackers("off").finds("processes.ask_about", question=question, pids=pids)

    assert there != absent


@pytest.mark.promise("The sandbox: `strict`", "A thread that …")
@pytest.mark.promise(
    "Layers of the sandbox",
    "A thread may ask for its own policy, priority and processors. No call changes them, for a process or a thread of "
    "whatever number.",
)
def test_what_is_answered_changes_nothing(
    runtime: moonpool.Runtime, attackers: Attackers, scene: dict[str, Any]
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        pytest.skip("there is one processor, so there is nothing to change")
    strict, off = attackers("strict"), attackers("off")
    pids = [scene["parent"], scene["sibling"], strict.pid]
    for pid in (*pids, 0):
        strict.finds("processes.pin_to", pid=pid, cores=cores[:1])
    assert [sorted(os.sched_getaffinity(pid)) for pid in pids] == [cores] * 3

    off.finds("processes.pin_to", pid=off.pid, cores=cores[:1])
    assert os.sched_getaffinity(off.pid) == {cores[0]}
    off.finds("processes.pin_to", pid=off.pid, cores=cores)
    assert answers(runtime)


@pytest.mark.promise(
    "The sandbox: `strict`",
    "A thread that asks libc for its own policy, priority or processors gets an answer: the same "
    "one for every number. What it sets changes nothing.",
)
def test_a_thread_asks_about_itself_without_an_error(attackers: Attackers) -> None:
    for level in ("off", "strict"):
        assert attackers(level).finds("processes.ask_in_a_thread") == {
            "pthread_getschedparam": [0, 0, 0],
            "pthread_getaffinity_np": 0,
            "pthread_setaffinity_np": 0,
            "pthread_setschedparam": 0,
            "pthread_getattr_np": 0,
        }


@pytest.mark.promise("The sandbox: `strict`", "No call tells …")
def test_a_model_may_ask_about_itself(attackers: Attackers) -> None:
    attacker = attackers("strict")
    about = ["getpgid", "getsid", "getpriority", "sched_getaffinity", "sched_getscheduler"]

    for question in about:
        pids = [0, attacker.pid]
        said = attacker.finds("processes.ask_about", question=question, pids=pids)
        assert said == ["done", "done"]


PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def dumpable(value: int) -> int:
    """Set if processes of this user may look into this one, and return the setting before."""
    libc = ctypes.CDLL(None)
    before = int(libc.prctl(PR_GET_DUMPABLE))
    libc.prctl(PR_SET_DUMPABLE, value)
    return before


@pytest.fixture
def exposed() -> Iterator[None]:
    """The runtime as it is where it serves no untrusted model."""
    before = dumpable(1)
    yield
    dumpable(before)


@pytest.mark.promise("Hostile models", "The same attacks succeed without a sandbox.")
@pytest.mark.usefixtures("exposed")
@pytest.mark.parametrize("attempt", [name for name, each in ATTEMPTS.items() if each.off])
def test_without_a_sandbox_other_processes_are_within_reach(
    attackers: Attackers, scene: dict[str, Any], attempt: str
) -> None:
    """So that the tests above can fail."""
    outcome = made(attackers("off"), ATTEMPTS[attempt], scene)

    if outcome.word == "EPERM" and YAMA.exists() and YAMA.read_text().strip() != "0":
        pytest.skip("this kernel has no process look into its parent (yama)")
    assert outcome.word in ATTEMPTS[attempt].off, outcome
    if "secret" in str(outcome.done):
        assert outcome.done == SECRET


# Each of these needs the right to trace the other process.
TRACING = [
    "tracing the runtime",
    "the runtime's memory by a call",
    "the runtime's memory by its file",
    "writing the runtime's memory",
    "a descriptor of the runtime",
    "the runtime's environment",
    "the runtime's maps",
]


@pytest.mark.promise(
    "The sandbox: `strict`",
    "Once a runtime serves such a model, no process of the runtime's user can inspect the runtime or the model.",
)
def test_a_runtime_of_untrusted_models_is_closed_to_trusted_ones_too(
    runtime: moonpool.Runtime, attackers: Attackers, scene: dict[str, Any], is_root: bool
) -> None:
    if is_root:
        pytest.skip("nothing is closed to root without a sandbox")
    attackers("strict")

    for attempt in TRACING:
        assert made(attackers("off"), ATTEMPTS[attempt], scene).word in ("EACCES", "EPERM")
    assert answers(runtime)


@pytest.mark.promise("The sandbox: `strict`", "It starts no …")
def test_threads_are_not_processes_and_may_be_started(attackers: Attackers) -> None:
    assert attackers("strict").finds("processes.start_threads", count=8) == 8


@pytest.mark.parametrize("level", ["standard", "strict"])
def test_a_model_is_in_a_session_of_its_own(attackers: Attackers, level: str) -> None:
    pid = attackers(level).pid

    assert os.getsid(pid) == os.getpgid(pid) == pid


@pytest.mark.promise("The sandbox: `strict`", "Once a runtime …")
def test_no_process_of_its_user_may_look_into_a_model(attackers: Attackers) -> None:
    """The files in /proc of a protected process belong to root, whatever its user is."""
    environ = Path(f"/proc/{attackers('strict').pid}/environ")

    # In a user namespace, root's files seem to belong to nobody.
    assert environ.stat().st_uid == Path("/proc/sys").stat().st_uid
    if os.geteuid():
        with pytest.raises(PermissionError):
            environ.read_bytes()
