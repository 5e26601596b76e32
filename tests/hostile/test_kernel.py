"""System calls that no model needs: those that only an attacker makes end the process, and the log says so."""

from __future__ import annotations

import platform

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.conftest import Attackers

# The kernel itself refuses the arguments of these calls, so they do no harm where no filter stops them.
KILLED = [
    "acct",
    "add_key",
    "bpf",
    "chroot",
    "delete_module",
    "finit_module",
    "fsopen",
    "init_module",
    "kcmp",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "mount",
    "mount_setattr",
    "move_mount",
    "open_by_handle_at",
    "open_tree",
    "perf_event_open",
    "pidfd_getfd",
    "pivot_root",
    "process_vm_readv",
    "process_vm_writev",
    "ptrace",
    "quotactl",
    "reboot",
    "request_key",
    "setns",
    "swapoff",
    "swapon",
    "umount2",
    "unshare",
    "userfaultfd",
]
# The filter refuses these with an error that libraries cope with.
REFUSED = [
    "adjtimex",
    "clock_settime",
    "execve",
    "execveat",
    "fanotify_init",
    "inotify_init1",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "ioprio_set",
    "memfd_create",
    "memfd_secret",
    "migrate_pages",
    "move_pages",
    "msgget",
    "name_to_handle_at",
    "pidfd_open",
    "pidfd_send_signal",
    "process_madvise",
    "process_mrelease",
    "rt_sigqueueinfo",
    "sched_setattr",
    "semget",
    "sethostname",
    "setresuid",
    "settimeofday",
    "shmget",
    "socket",
    "syslog",
    "vhangup",
]


@pytest.mark.promise(
    "The sandbox: `strict`",
    "A system call that only an attack makes ends the process, and the runtime says so, with the "
    "call's name if the kernel's log has it. Other calls that no model needs are refused, "
    "through every gate into the kernel.",
)
@pytest.mark.parametrize("name", KILLED)
def test_a_call_that_only_an_attacker_makes_ends_the_process(
    attackers: Attackers, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    outcome = attackers("strict").tries("kernel.with_bad", name=name)

    assert outcome.died is not None, outcome
    assert "was killed by SIGSYS: it made a system call that its sandbox does not allow" in (outcome.died)
    assert "SIGSYS" in caplog.text
    assert attackers("strict").finds("kernel.make", name="getpid") > 0


@pytest.mark.promise("The sandbox: `strict`", "A system call …")
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_no_model_needs_is_refused(attackers: Attackers, name: str) -> None:
    outcome = attackers("strict").tries("kernel.with_bad", name=name)

    assert outcome.word in ("EPERM", "ENOSYS", "killed"), outcome


@pytest.mark.promise("The sandbox: `strict`", "No layer can …")
def test_a_process_is_not_made_a_weaker_one(attackers: Attackers) -> None:
    """ADDR_NO_RANDOMIZE, so that everything lies where it lay before."""
    attempt = {"name": "personality", "arguments": [0x0040000]}

    assert attackers("strict").tries("kernel.make", **attempt).word == "EPERM"
    assert attackers("off").tries("kernel.make", **attempt).word == "done"


@pytest.mark.promise("Hostile models", "The same attacks succeed without a …")
def test_without_a_sandbox_the_kernel_itself_looks_at_the_arguments(attackers: Attackers) -> None:
    attacker = attackers("off")
    pid = attacker.pid
    reached = {
        name: attacker.tries("kernel.with_bad", name=name).word
        for name in [*KILLED, *REFUSED]
        if name != "vhangup"  # it takes no arguments, so it would succeed
    }

    assert attacker.pid == pid, "one of them was stopped"
    # Without a filter, the kernel refuses some calls because this user lacks the right, but fewer than half.
    assert list(reached.values()).count("EPERM") < len(reached) / 2, reached


# These enter the kernel by another ABI, in which the numbers mean other calls.
GATES = ["as_x32", "as_i386"]


@pytest.mark.promise("The sandbox: `strict`", "A system call …")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86_64 has gates of other ABIs")
@pytest.mark.parametrize("gate", GATES)
def test_other_gates_into_the_kernel_are_shut(attackers: Attackers, gate: str) -> None:
    assert attackers("strict").tries(f"kernel.{gate}").word in ("killed", "EPERM", "ENOSYS")


PRCTL = ["forget_the_parent", "become_dumpable", "allow_tracers", "move_its_memory"]


@pytest.mark.promise("The sandbox: `strict`", "No layer can be taken off again.")
@pytest.mark.parametrize("what", PRCTL)
def test_no_layer_can_be_taken_off(attackers: Attackers, what: str) -> None:
    assert attackers("strict").tries(f"kernel.{what}").word in ("EPERM", "killed")


@pytest.mark.promise("The sandbox: `standard`", "A model gains …")
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_no_new_privileges_cannot_be_taken_back(attackers: Attackers, level: str) -> None:
    assert attackers(level).tries("kernel.drop_no_new_privs").word in ("EINVAL", "EPERM", "killed")


def test_without_a_sandbox_a_model_may_outlive_its_runtime(attackers: Attackers) -> None:
    attacker = attackers("off")
    assert attacker.tries("kernel.forget_the_parent").word == "done"
    assert attacker.tries("kernel.become_dumpable").word == "done"
