"""The filter's program, run in an interpreter: for each rule what it lets through and what it does not."""

from __future__ import annotations

import pytest
from tests.stub.sandbox.bpf import ALLOW, DONE, ENOSYS, EPERM, KILL, verdict

from moonpool.ipc import syscalls
from moonpool.stub.sandbox import rules, seccomp

pytestmark = [pytest.mark.promise("The sandbox: `strict`", "Its sockets are …")]

PID = 4321
MACHINES = list(syscalls.ARCHITECTURES)
THREAD = 0x3D0F00  # libc starts threads with these flags
NEW_USER = 0x10000000
TABLES = {
    "usual": rules.allowed(pid=PID),
    "ports": rules.allowed(pid=PID, ports=True),
    "ports and processes": rules.allowed(pid=PID, ports=True, granted=["fork"]),
    "locks": rules.allowed(pid=PID, granted=["locks"]),
    "unix": rules.allowed(pid=PID, granted=["unix"]),
    "files alone": rules.allowed(pid=PID, has_files_alone=True),
    "own files": rules.allowed(pid=PID, metadata=True),
    "template": rules.allowed(pid=PID, forks=True, signals_are_scoped=True),
    "launcher": rules.allowed(pid=PID, launches=True),
}
FILTERS = {
    (machine, kind): seccomp.program(
        machine, table, rules.KILLED, rules.ABSENT, rules.silent(has_files_alone=kind == "files alone")
    )
    for machine in MACHINES
    for kind, table in TABLES.items()
}


def judged(machine: str, name: str, *arguments: int, kind: str = "usual") -> int:
    number = syscalls.numbers(machine)[name]
    return verdict(FILTERS[machine, kind], syscalls.ARCHITECTURES[machine], number, arguments)


# Each call has arguments that the filter allows, and arguments that it refuses.
BY_ARGUMENT = {
    "clone": ([THREAD], [0x11], [0x4111], [THREAD | NEW_USER], [THREAD | 0x2000], [THREAD | 0x8000]),
    "kill": ([PID, 15], [1, 9], [PID + 1, 9], [0, 9], [-1, 9], [-PID, 9]),
    "tgkill": ([PID, PID, 6], [1, 1, 9], [-1, 1, 9]),
    **dict.fromkeys(["getpgid", "getsid", "sched_getparam", "sched_getscheduler"], ([0], [1], [PID + 1])),
    "sched_getattr": ([PID, 0, 48, 0], [1, 0, 48, 0]),
    "sched_getaffinity": ([PID, 128, 0], [1, 128, 0], [PID + 1, 128, 0]),
    "getpriority": ([0, 0], [0, 1], [1, 0], [2, 0]),
    # CLOCK_MONOTONIC and a thread's clock are allowed. A process's and a device's are not.
    **dict.fromkeys(
        ["clock_gettime", "clock_getres", "clock_nanosleep", "timer_create"],
        ([1], [~PID << 3 | 2], [~1 << 3 | 2], [~5 << 3 | 3]),
    ),
    "prlimit64": ([0, 7, 0, 1], [1, 7, 0, 1], [PID + 1, 7, 1, 0]),
    # Without O_CREAT, the mode is whatever the register happens to hold.
    "open": ([0, 0o100, 0o777], [0, 0o100, 0o4755], [0, 0o1101, 0o2755], [0, 0o20200002, 0o4700]),
    "openat": (
        [-100, 0, 0o100, 0o777],
        [-100, 0, 0o100, 0o4755],
        [-100, 0, 0o1101, 0o2755],
        [-100, 0, 0o20200002, 0o4700],
    ),
    "creat": ([0, 0o777], [0, 0o4755], [0, 0o2755]),
    "fallocate": ([3, 0, 0, 4096], [3, 3, 0, 4096]),
    "madvise": ([0, 4096, 4], [0, 4096, 9], [0, 4096, 12], [0, 4096, 100]),
    "ioctl": ([1, 0x5401], [1, 0x5412], [1, 0x5452], [1, 0x541C]),
    "fcntl": (
        [3, 1],
        [3, 8, 1],
        [3, 10, 9],
        [3, 15, 0],
        [3, 1024, 1],
        [3, 1031, 1 << 20],
        [3, 5],
        [3, 6],
        [3, 7],
        [3, 36],
        [3, 37],
        [3, 38],
    ),
    "prctl": ([15, 0], [1, 0], [4, 1], [22, 2], [24, 0], [35, 9], [0x59616D61, 1], [8, 1], [28, 0]),
    "socketpair": ([1, 1, 0], [1, 2, 0], [1, 3, 0], [2, 1, 0], [16, 1, 0]),
    "setsockopt": (
        [3, 1, 20],
        [3, 1, 7],
        [3, 1, 8],
        [3, 1, 32],
        [3, 1, 33],
        [3, 1, 26],
        [3, 1, 50],
        [3, 1, 51],
        [3, 6, 31],
        [3, 0, 64],
    ),
    "personality": ([0xFFFFFFFF], [0x0040000], [0]),
}


@pytest.mark.promise("Layers of the sandbox", "It starts no process and …")
@pytest.mark.promise(
    "Layers of the sandbox", "A process may name only itself in calls, and cannot read clocks of other processes."
)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", BY_ARGUMENT)
def test_a_call_is_judged_by_its_arguments(machine: str, name: str) -> None:
    good, *bad = BY_ARGUMENT[name]
    if name not in syscalls.numbers(machine):
        pytest.skip(f"{machine} does not have it")

    assert judged(machine, name, *good) == ALLOW
    refused = ENOSYS if name in rules.ABSENT else DONE if name in rules.silent() else EPERM
    assert {tuple(each): judged(machine, name, *each) for each in bad} == {tuple(each): refused for each in bad}


@pytest.mark.promise("Layers of the sandbox", "No file gets the set-user-ID or …")
@pytest.mark.parametrize("machine", MACHINES)
def test_a_file_that_is_only_opened_may_come_with_any_mode(machine: str) -> None:
    assert judged(machine, "openat", -100, 0, 0o2, 0o7777) == ALLOW


@pytest.mark.promise("Layers of the sandbox", "No file gets the set-user-ID or set-group-ID bit, whatever is granted.")
@pytest.mark.parametrize("machine", MACHINES)
def test_no_mode_with_set_ids_is_given_to_a_file(machine: str) -> None:
    for name, before in {"fchmod": [3], "fchmodat": [3, 0], "fchmodat2": [3, 0]}.items():
        assert judged(machine, name, *before, 0o1777, kind="own files") == ALLOW
        for mode in (0o4755, 0o2755, 0o6000):
            assert judged(machine, name, *before, mode, kind="own files") == EPERM


@pytest.mark.promise("Layers of the sandbox", "No file gets the set-user-ID or …")
@pytest.mark.parametrize("machine", MACHINES)
def test_a_grant_does_not_take_that_off(machine: str) -> None:
    names = ["openat", "fchmodat", "mknodat"]
    table = rules.allowed(pid=PID, granted=names)
    program = seccomp.program(machine, table, rules.KILLED, rules.ABSENT)
    for name, before in {"openat": [3, 0, 0o100], "fchmodat": [3, 0], "mknodat": [3, 0]}.items():
        number = syscalls.numbers(machine)[name]
        for mode, expected in {0o100755: ALLOW, 0o104755: EPERM}.items():
            architecture = syscalls.ARCHITECTURES[machine]
            assert verdict(program, architecture, number, (*before, mode)) == expected


def test_every_rule_about_arguments_is_tried_here() -> None:
    conditional = {name for name, alternatives in rules.allowed(pid=PID).items() if alternatives}

    assert conditional == set(BY_ARGUMENT)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_thread_may_read_its_own_clock(machine: str) -> None:
    """The kernel itself checks that the thread is one of the process."""
    assert judged(machine, "clock_gettime", ~PID << 3 | 4 | 2) == ALLOW


@pytest.mark.promise("Layers of the sandbox", "Locks on parts of files are …")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("command", [5, 6, 7, 36, 37, 38])
def test_parts_of_files_are_locked_where_that_is_granted(machine: str, command: int) -> None:
    assert judged(machine, "fcntl", 3, command, kind="locks") == ALLOW
    assert judged(machine, "fcntl", 3, 1031, kind="locks") == EPERM


@pytest.mark.promise("Layers of the sandbox", "Locks on parts of files are …")
@pytest.mark.parametrize("machine", MACHINES)
def test_locks_on_files_that_nobody_else_writes_do_nothing(machine: str) -> None:
    found = {command: judged(machine, "fcntl", 3, command, kind="files alone") for command in range(5, 39)}

    assert {command for command, each in found.items() if each == DONE} == {6, 7}
    assert {command for command, each in found.items() if each == ALLOW} == {5}
    assert judged(machine, "fcntl", 3, 6) == EPERM


@pytest.mark.promise("Layers of the sandbox", "A thread may ask for its own policy …")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", TABLES)
def test_all_numbers_but_its_own_get_one_answer(machine: str, kind: str) -> None:
    for name in ("sched_getscheduler", "sched_getparam", "sched_getaffinity"):
        assert judged(machine, name, PID, kind=kind) == judged(machine, name, 0, kind=kind) == ALLOW
        assert {judged(machine, name, each, kind=kind) for each in (1, PID + 1, -1)} == {DONE}
    for policy, expected in {0: DONE, 1: EPERM, 2: EPERM, 3: EPERM, 6: EPERM}.items():
        assert judged(machine, "sched_setscheduler", PID, policy, kind=kind) == expected


@pytest.mark.promise("Layers of the sandbox", "A model that may fork passes descriptors …")
@pytest.mark.parametrize("machine", MACHINES)
def test_the_grant_of_unix_sockets_is_for_streams_and_packets(machine: str) -> None:
    kinds = {(1, 1): ALLOW, (1, 5 | 0x80000): ALLOW, (1, 2): EPERM, (2, 1): EPERM, (16, 3): EPERM}
    assert {each: judged(machine, "socket", *each, kind="unix") for each in kinds} == kinds
    for name in ("bind", "listen", "accept4", "connect"):
        assert (judged(machine, name), judged(machine, name, kind="unix")) == (EPERM, ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", sorted(rules.KILLED))
def test_a_call_that_only_an_attack_makes_ends_the_process(machine: str, name: str) -> None:
    if name not in syscalls.numbers(machine):
        pytest.skip(f"{machine} does not have it")

    assert judged(machine, name) == KILL


@pytest.mark.promise(
    "Layers of the sandbox",
    "A system call that is not on the list fails with EPERM. One that only an attack "
    "makes ends the process. One that is newer than the list fails with ENOSYS, and so "
    "does `clone3`.",
)
@pytest.mark.parametrize("machine", MACHINES)
def test_calls_that_are_not_listed_are_refused(machine: str) -> None:
    allowed = rules.allowed(pid=PID)
    named = {*allowed, *rules.KILLED, *rules.ABSENT}

    # Every one of these is answered for some arguments.
    named |= rules.silent().keys()

    others = {name: judged(machine, name) for name in syscalls.numbers(machine) if name not in named}

    assert set(others.values()) == {EPERM}
    assert {"socket", "execve", "memfd_create", "sched_setattr", "io_uring_setup"} <= set(others)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_without_conditions_is_let_through(machine: str) -> None:
    numbers = syscalls.numbers(machine)
    free = [name for name, rule in rules.allowed(pid=PID).items() if not rule and name in numbers]

    assert {name for name in free if judged(machine, name, -1, -1, -1) != ALLOW} == set()


@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_whose_flags_no_filter_sees_is_not_there(machine: str) -> None:
    assert judged(machine, "clone3") == ENOSYS


@pytest.mark.promise("Layers of the sandbox", "A system call that is not …")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("number", [470, 1023, 0x3FFFFFFF])
def test_a_call_that_is_newer_than_the_tables_is_not_there(machine: str, number: int) -> None:
    filter_program = FILTERS[machine, "usual"]

    assert verdict(filter_program, syscalls.ARCHITECTURES[machine], number) == ENOSYS


@pytest.mark.promise(
    "Layers of the sandbox",
    "The filter is made for x86-64 and AArch64 and ends a process that calls by another "
    "machine's numbers, x32 included.",
)
@pytest.mark.parametrize("number", [0, 1, 0x40000000, 0x40000000 | 59, 0xFFFFFFFF])
@pytest.mark.parametrize("machine", MACHINES)
def test_calls_by_another_machine_s_numbers_end_the_process(machine: str, number: int) -> None:
    filter_program = FILTERS[machine, "usual"]

    # The architectures are 32-bit x86 and ARM, and the other one of the two machines.
    for architecture in (0x40000003, 0x40000028, *syscalls.ARCHITECTURES.values()):
        if architecture != syscalls.ARCHITECTURES[machine]:
            assert verdict(filter_program, architecture, number) == KILL


@pytest.mark.promise("Layers of the sandbox", "The filter is made for x86-64 …")
@pytest.mark.parametrize("number", [0x40000000, 0x40000000 | 59, 0xFFFFFFFF])
def test_the_32_bit_form_of_x86_64_ends_the_process(number: int) -> None:
    filter_program = FILTERS["x86_64", "usual"]

    assert verdict(filter_program, syscalls.ARCHITECTURES["x86_64"], number) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((2, 1, 0), ALLOW),
        ((10, 1 | 0x80000 | 0x800, 6), ALLOW),
        ((2, 2, 17), EPERM),
        ((2, 1, 262), EPERM),
        ((2, 1, 256), EPERM),
        ((2, 3, 6), EPERM),
        ((1, 1, 0), EPERM),
        ((16, 3, 0), EPERM),
        ((40, 1, 0), EPERM),
    ],
)
def test_only_streams_of_tcp_are_opened_where_ports_are_granted(
    machine: str, arguments: tuple[int, ...], expected: int
) -> None:
    assert judged(machine, "socket", *arguments, kind="ports") == expected
    assert judged(machine, "socket", *arguments) == EPERM


@pytest.mark.promise("Layers of the sandbox", "A contained process sends no …")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("name", "place"), [("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)])
def test_nothing_connects_while_it_sends(machine: str, name: str, place: int) -> None:
    for kind in ("ports", "ports and processes"):
        flags = [0] * 6
        flags[place] = 0x4000
        assert judged(machine, name, *flags, kind=kind) == ALLOW

        flags[place] |= 0x20000000

        assert judged(machine, name, *flags, kind=kind) == EPERM


@pytest.mark.promise(
    "Layers of the sandbox",
    "A contained process sends no descriptors, unless it may have processes or ports, and it "
    "connects to nothing while it sends.",
)
@pytest.mark.parametrize("machine", MACHINES)
def test_descriptors_are_sent_only_where_there_is_somebody_to_send_them_to(machine: str) -> None:
    assert judged(machine, "sendmsg", 3, 0, 0) == EPERM
    assert judged(machine, "sendmmsg", 3, 0, 1, 0) == EPERM
    assert judged(machine, "sendmsg", 3, 0, 0, kind="template") == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["bind", "listen", "accept4"])
def test_nobody_listens_even_where_ports_are_granted(machine: str, name: str) -> None:
    assert judged(machine, name, 3, kind="ports") == EPERM


@pytest.mark.promise(
    "Layers of the sandbox",
    "An instance may change modes, owners, times and attributes only if the files of "
    "others are safe, by read-only mounts or by a private user.",
)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["fchmod", "fchmodat", "fchownat", "utimensat", "fsetxattr"])
def test_modes_are_changed_only_where_the_files_of_others_are_safe(machine: str, name: str) -> None:
    assert judged(machine, name) == EPERM
    assert judged(machine, name, kind="own files") == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_a_template_forks_and_may_put_further_layers_on(machine: str) -> None:
    assert judged(machine, "clone", 0x11, kind="template") == ALLOW
    for flag in (NEW_USER, 0x2000, 0x8000, 0x20000, 0x2000000, 0x20000000, 0x40000000):
        assert judged(machine, "clone", 0x11 | flag, kind="template") == EPERM
    assert judged(machine, "seccomp", kind="template") == ALLOW
    assert judged(machine, "execve", kind="template") == EPERM


def test_a_prepared_filter_gets_the_number_of_each_process() -> None:
    def program(number: int) -> bytes:
        return seccomp.program("x86_64", {"kill": (((0, rules.ALL_BITS, (number,)),),)})

    prepared = seccomp.PreparedFilter(program(12345))
    places = prepared.places_of(12345)
    for number in (7, 1 << 20):
        prepared.change(places, number)
        assert bytes(prepared.program) == program(number)
        assert prepared.places_of(number) == places


@pytest.mark.parametrize("machine", MACHINES)
def test_a_launcher_becomes_another_program_and_forks_nothing(machine: str) -> None:
    assert judged(machine, "execve", kind="launcher") == ALLOW
    assert judged(machine, "seccomp", kind="launcher") == ALLOW
    assert judged(machine, "clone", 0x11, kind="launcher") == EPERM


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["socket", "ptrace", "ioctl", "execve"])
def test_a_call_that_was_granted_by_name_is_free(machine: str, name: str) -> None:
    table = rules.allowed(pid=PID, granted=[name])
    filter_program = seccomp.program(machine, table, rules.KILLED, rules.ABSENT)
    number = syscalls.numbers(machine)[name]

    assert verdict(filter_program, syscalls.ARCHITECTURES[machine], number, (9, 9, 9)) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_fork_is_granted_as_libc_does_it(machine: str) -> None:
    table = rules.allowed(pid=PID, granted=["fork"])
    filter_program = seccomp.program(machine, table, rules.KILLED, rules.ABSENT)
    number = syscalls.numbers(machine)["clone"]
    architecture = syscalls.ARCHITECTURES[machine]

    assert verdict(filter_program, architecture, number, (0x1200011,)) == ALLOW
    assert verdict(filter_program, architecture, number, (0x11 | NEW_USER,)) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_a_filter_is_looked_up_in_few_steps(machine: str) -> None:
    # Each step makes the model's calls slower, unless the kernel knows that a call is always allowed.
    steps = 40
    for name, number in syscalls.numbers(machine).items():
        if name not in BY_ARGUMENT:
            verdict(FILTERS[machine, "usual"], syscalls.ARCHITECTURES[machine], number, steps=steps)
