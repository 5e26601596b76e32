"""The table of system calls that a contained model may make, with conditions on their arguments.

Other calls fail with EPERM, which libraries handle as they do in any container. A call that only
an attack makes ends the process, so that the runtime learns of it. Numbers that are newer than the tables fail
with ENOSYS, and libc then uses older calls.

Arguments are compared as 32 bits: for the kernel, each argument with a condition is an int, and it does not look at
the rest of the word.

The attacks behind the conditions fall into four kinds:

- *to reach other processes*: to trace them, read their memory, take their descriptors or signal them (`_ATTACKS`, the
  pids in `_conditional`), and to learn which exist (`_OF_A_PROCESS`, clocks of processes, `capget`, F_GETLK);
- *to leave the sandbox*: to make namespaces and mounts (`_ATTACKS`, the flags of `clone`), to open sockets past
  Landlock's ports (MSG_FASTOPEN, other protocols, TCP_ULP), to leave programs with set-ID bits behind
  (`_WITHOUT_SET_IDS`);
- *to take memory away from under the runtime*: to punch holes into regions (`fallocate`, MADV_REMOVE);
- *to use up what the kernel counts for the whole user, or not at all*: epoll, descriptors in sockets, sizes of pipes
  and sockets, locks.

Some calls are answered with success and do nothing (`silent`), because libraries make them, take an error for a fault,
and lose nothing by this answer. libc passes the number of a thread for what `pthread_getschedparam` and its like ask. A
filter does not know which numbers are the process's own threads, and an answer of the kernel would tell which numbers
exist. So all numbers get the same answer: the usual policy and priority, and no processors, which callers take for
unknown. And locks on parts of files that no other process can reach keep nobody out. So a process has them without a
lock in the kernel, of which it could make any number.

F_SETFL and FIONBIO are allowed for O_NONBLOCK only. Each end of a channel has its own
flags, and so has the stub's end of the output pipe. The runtime does not block on its own ends,
whatever the stub does. Only the file descriptions of regions are shared with the runtime, and O_NONBLOCK means
nothing there. O_APPEND would have an effect there, so it is forbidden, and so are all ways to make a file send signals.
"""

from __future__ import annotations

from collections.abc import Iterable

# The number of an argument, a mask, and the values that the masked argument may have.
Condition = tuple[int, int, Iterable[int]]
# A call is allowed if all conditions of one alternative hold. An empty tuple allows it without condition.
Alternatives = tuple[tuple[Condition, ...], ...]

ALL_BITS = 0xFFFFFFFF

_FILES = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile copy_file_range
open openat creat close close_range dup dup2 dup3 fsync fdatasync sync_file_range fadvise64 readahead flock
stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat
getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2
link linkat symlink symlinkat truncate ftruncate umask
getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
"""
# Landlock does not restrict these, so they are only for processes that cannot change files of others anyway.
_METADATA = """
chown fchown lchown fchownat utime utimes futimesat utimensat
setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
"""
# The place of the mode among the arguments.
_CHANGES_OF_MODE = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2}
_MAKES_OF_FILES = {"mknod": 1, "mknodat": 2}
_OPENINGS = {"open": (1, 2), "openat": (2, 3)}
# Calls whose modes lie in memory, where a filter cannot read them, and calls that make such calls.
HIDING_MODES = frozenset(["openat2", "io_uring_setup"])
# Without epoll: its watches are counted for all processes of the user, and a process can have as many as the square of
# its descriptors. If the user has none left, the runtime cannot take another connection. Python's event loops use
# `poll` instead.
_WAITING = """
poll ppoll select pselect6 eventfd eventfd2 pipe pipe2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4
"""
# For the channels, and for pairs from `socketpair`; there are no other sockets. Without `sendmsg`, which can send
# descriptors: the kernel counts those that wait in a socket for all processes of the user, the runtime included
# (unix(7)).
_SOCKETS = """
sendto recvfrom recvmsg recvmmsg shutdown getsockname getpeername getsockopt
"""
_MEMORY = """
mmap munmap mprotect mremap brk msync mlock mlock2 munlock munlockall membarrier mseal map_shadow_stack
pkey_mprotect pkey_alloc pkey_free get_mempolicy
"""
_THREADS = """
futex futex_wait futex_wake futex_requeue futex_waitv set_robust_list set_tid_address rseq arch_prctl exit
exit_group wait4 waitid sched_yield sched_get_priority_max sched_get_priority_min getcpu
"""
_SIGNALS = """
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pause
restart_syscall
"""
_TIME = """
nanosleep gettimeofday time times getitimer setitimer alarm
timer_settime timer_gettime timer_getoverrun timer_delete
"""
# Without `capget`, whose pid lies in memory, where a filter cannot read it. It would tell which processes exist.
_ABOUT_ITSELF = """
getpid getppid gettid getpgrp getuid geteuid getresuid getgid getegid getresgid getgroups
getrlimit setrlimit getrusage sysinfo uname getrandom
"""
# Their first argument is a pid, and the answer tells if that process exists. 0 is the process itself.
_OF_A_PROCESS = """
getpgid getsid sched_getaffinity sched_getparam sched_getscheduler sched_getattr prlimit64
"""
# libc makes these with the number of a thread.
_OF_A_THREAD = "sched_getscheduler sched_getparam sched_getaffinity sched_setaffinity"
_SCHED_OTHER = 0
_OF_A_CLOCK = "clock_gettime clock_getres clock_nanosleep timer_create"
_USUAL = " ".join((_FILES, _WAITING, _SOCKETS, _MEMORY, _THREADS, _SIGNALS, _TIME, _ABOUT_ITSELF)).split()

_ATTACKS = """
ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd bpf perf_event_open userfaultfd
add_key request_key keyctl unshare setns mount umount2 pivot_root chroot move_mount open_tree open_tree_attr
fsopen fsconfig fsmount fspick mount_setattr open_by_handle_at init_module finit_module delete_module
kexec_load kexec_file_load reboot swapon swapoff acct quotactl quotactl_fd iopl ioperm modify_ldt
"""
KILLED = frozenset(_ATTACKS.split())
# May be granted like a call: all calls by which libc starts processes.
FORK = "fork"
# May be granted, too: locks on parts of files, which SQLite uses.
LOCKS = "locks"
# May be granted, too: sockets with which the processes of a model talk. No filter and no rule of Landlock before its
# version 9 keeps them from other sockets on the machine.
UNIX = "unix"
GRANTED_TOGETHER = frozenset([FORK, LOCKS, UNIX])
# These fail with ENOSYS if they are refused. The flags of `clone3` lie in memory, which a filter cannot read; libc then
# uses `clone`.
ABSENT = frozenset(["clone3"])

_CLONE_THREAD = 0x00010000
# CLONE_PTRACE, PARENT (whose children would be the runtime's), UNTRACED, and NEW* of mnt, cgroup, uts, ipc, user, pid,
# net.
_CLONE_FORBIDDEN = 0x2000 | 0x8000 | 0x800000 | 0x20000 | 0x7E000000
_O_NONBLOCK, _O_LARGEFILE, _ACCESS = 0x800, 0x8000 | 0x20000, 0o3
_SOCK_TYPE = ALL_BITS & ~(0x800 | 0x80000)  # without SOCK_NONBLOCK and SOCK_CLOEXEC
_MSG_FASTOPEN = 0x20000000
_CLOCK_OF_TASK, _CLOCK_OF_THREAD = 0x80000000, 0x80000004


def allowed(
    *,
    pid: int,
    ports: bool = False,
    granted: Iterable[str] = (),
    gpu: bool = False,
    metadata: bool = False,
    has_files_alone: bool = False,
    forks: bool = False,
    signals_are_scoped: bool = False,
    launches: bool = False,
) -> dict[str, Alternatives]:
    """Return the calls that the process `pid` may make.

    - `ports`: it may open TCP connections.
    - `granted`: names of calls, `fork` for processes of its own, `locks` for locks on parts of files, `unix` for
      sockets of AF_UNIX.
    - `gpu`: it talks to the driver of GPUs.
    - `metadata`: it may change modes and times of the files that it can reach.
    - `has_files_alone`: it may ask for locks on files, and gets those of `silent`.
    - `forks`: it is a template.
    - `signals_are_scoped`: Landlock keeps its signals inside the sandbox.
    - `launches`: it will become another program, which installs its own filter.
    """
    granted = set(granted)
    table: dict[str, Alternatives] = dict.fromkeys(_USUAL, ())
    table.update(_conditional(pid))
    table.update(_WITHOUT_SET_IDS)
    if metadata:
        table.update(dict.fromkeys(_METADATA.split(), ()))
        table.update(_CHANGES_WITHOUT_SET_IDS)
    if ports:
        table.update(_TCP)
    if gpu:
        _add(table, _GPU)
    if forks or FORK in granted:
        table.update(dict.fromkeys(("fork", "vfork"), ()))
        # A forked process makes its calls over a socket that it sends to its parent.
        table.setdefault("sendmsg", ())
        table["clone"] = (((0, _CLONE_FORBIDDEN, (0,)),),)
        if signals_are_scoped:
            # A child has another pid than the one that is known here.
            table.update(dict.fromkeys(("kill", "tgkill"), ()))
    if forks:
        table["setsid"] = ()
    if forks or launches:
        table["seccomp"] = ()
    if launches:
        table["execve"] = ()
    if LOCKS in granted or has_files_alone:
        commands = _LOCKING if LOCKS in granted else (_F_GETLK,)
        table["fcntl"] = (*table["fcntl"], *_one_of(1, commands))
    if UNIX in granted:
        _add(table, _UNIX)
    table.update(dict.fromkeys(granted - GRANTED_TOGETHER, ()))
    # A granted call keeps these conditions.
    conditions = _WITHOUT_SET_IDS | _CHANGES_WITHOUT_SET_IDS | _MAKES_WITHOUT_SET_IDS
    table.update({name: conditions[name] for name in granted & conditions.keys()})
    return table


def _add(table: dict[str, Alternatives], more: dict[str, Alternatives]) -> None:
    """Add alternatives to those of a table, in which none of these calls is without a condition."""
    for name, alternatives in more.items():
        table[name] = (*table.get(name, ()), *alternatives)


def silent(*, has_files_alone: bool = False) -> dict[str, Alternatives]:
    """Return the calls that are answered with success and do nothing, unless they are allowed. The arguments are those
    of `allowed`.
    """
    table: dict[str, Alternatives] = dict.fromkeys(_OF_A_THREAD.split(), ())
    table["sched_setscheduler"] = _one_of(1, (_SCHED_OTHER,))
    if has_files_alone:
        table["fcntl"] = _one_of(1, (_F_SETLK, _F_SETLKW))
    return table


def _conditional(pid: int) -> dict[str, Alternatives]:
    return {
        "clone": (((0, _CLONE_THREAD | _CLONE_FORBIDDEN, (_CLONE_THREAD,)),),),
        "kill": _one_of(0, (pid,)),
        "tgkill": _one_of(0, (pid,)),
        **dict.fromkeys(_OF_A_PROCESS.split(), _one_of(0, (0, pid))),
        # PRIO_PROCESS
        "getpriority": (((0, ALL_BITS, (0,)), (1, ALL_BITS, (0, pid))),),
        # A clock with a negative number belongs to a process, whose pid is in the number, or to a thread. The kernel
        # gives clocks of threads to no other process.
        **dict.fromkeys(
            _OF_A_CLOCK.split(),
            (*_one_of_bits(0, _CLOCK_OF_TASK, 0), *_one_of_bits(0, _CLOCK_OF_THREAD, _CLOCK_OF_THREAD)),
        ),
        "personality": _one_of(0, (0xFFFFFFFF,)),
        # Mode 0 only allocates memory; other modes could take it away from under the runtime.
        "fallocate": _one_of(1, (0,)),
        "madvise": _one_of(2, _ADVICE),
        "ioctl": _one_of(1, _IOCTLS),
        "fcntl": (
            *_one_of(1, _FCNTLS),
            ((1, ALL_BITS, (4,)), (2, ALL_BITS & ~(_O_NONBLOCK | _O_LARGEFILE | _ACCESS), (0,))),
        ),
        "prctl": (
            *_one_of(0, _PRCTLS),
            # To the values that they have already; an exec resets the second one.
            ((0, ALL_BITS, (1,)), (1, ALL_BITS, (9,))),  # PR_SET_PDEATHSIG, SIGKILL
            ((0, ALL_BITS, (4,)), (1, ALL_BITS, (0,))),  # PR_SET_DUMPABLE, no
        ),
        # AF_UNIX with SOCK_STREAM or SOCK_SEQPACKET, which can only send to each other.
        "socketpair": (((0, ALL_BITS, (1,)), (1, _SOCK_TYPE, (1, 5))),),
        "setsockopt": (_options(1, _SOCKET_OPTIONS),),
    }


def _options(level: int, values: Iterable[int]) -> tuple[Condition, ...]:
    return ((1, ALL_BITS, (level,)), (2, ALL_BITS, values))


def _one_of_bits(argument: int, mask: int, value: int) -> Alternatives:
    return (((argument, mask, (value,)),),)


def _one_of(argument: int, values: Iterable[int]) -> Alternatives:
    return (((argument, ALL_BITS, values),),)


# All users of the machine run a program with the set-user-ID or set-group-ID bit as the owner of its file. In a granted
# folder, that may be root. If a call only opens a file, the mode is whatever the register holds, so it is not compared.
_SET_IDS = 0o6000
_MAKING = 0o100 | 0o20000000  # O_CREAT, and O_TMPFILE without O_DIRECTORY
_WITHOUT_SET_IDS: dict[str, Alternatives] = {
    "creat": _one_of_bits(1, _SET_IDS, 0),
    **{
        name: (*_one_of_bits(flags, _MAKING, 0), *_one_of_bits(mode, _SET_IDS, 0))
        for name, (flags, mode) in _OPENINGS.items()
    },
}
_CHANGES_WITHOUT_SET_IDS: dict[str, Alternatives] = {
    name: _one_of_bits(mode, _SET_IDS, 0) for name, mode in _CHANGES_OF_MODE.items()
}
_MAKES_WITHOUT_SET_IDS: dict[str, Alternatives] = {
    name: _one_of_bits(mode, _SET_IDS, 0) for name, mode in _MAKES_OF_FILES.items()
}


# MADV_* without REMOVE, which punches holes, MERGEABLE, by which memory of others can be guessed, and those that poison
# pages.
_ADVICE = (0, 1, 2, 3, 4, 8, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 25)
# FIONREAD, FIONBIO, FIOCLEX, FIONCLEX, TCGETS, TCGETS2, TIOCGWINSZ
_IOCTLS = (0x541B, 0x5421, 0x5451, 0x5450, 0x5401, 0x802C542A, 0x5413)
# The requests of NVIDIA's driver have the type 'F'; those of its unified memory are small numbers without a type, and
# two that begin and end its use. Landlock decides which devices they reach. CUDA does not start without `memfd_create`,
# nor without a socket of AF_UNIX and SOCK_SEQPACKET with an abstract name, on which other processes could ask it for a
# descriptor. It may listen, but `accept` is refused, and so is `connect` if no ports are granted.
_GPU: dict[str, Alternatives] = {
    "ioctl": (*_one_of(1, (0x30000001, 0x30000002)), ((1, 0xFF00, (0x4600,)),), ((1, ALL_BITS & ~0xFF, (0,)),)),
    "memfd_create": (),
    "socket": (((0, ALL_BITS, (1,)), (1, _SOCK_TYPE, (5,))),),
    "bind": (),
    "listen": (),
}
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_GET_SEALS. No locks on parts of files: a process
# may hold any number of them, and each takes kernel memory that no limit counts. F_GETLK tells who holds one. `flock`
# is bounded: it locks a whole file, once for each descriptor. No F_SETPIPE_SZ: the kernel counts the sizes of pipes for
# all processes of the user.
_FCNTLS = (0, 1, 2, 3, 1030, 1032, 1034)
_F_GETLK, _F_SETLK, _F_SETLKW = 5, 6, 7
# And the same for open file descriptions.
_LOCKING = (_F_GETLK, _F_SETLK, _F_SETLKW, 36, 37, 38)
# SOCK_STREAM and SOCK_SEQPACKET of AF_UNIX.
_UNIX: dict[str, Alternatives] = {
    "socket": (((0, ALL_BITS, (1,)), (1, _SOCK_TYPE, (1, 5))),),
    **dict.fromkeys(("bind", "listen", "accept", "accept4", "connect"), ()),
}
# PR_GET_PDEATHSIG, GET_DUMPABLE, SET_NAME, GET_NAME, GET_SECCOMP, CAPBSET_READ, SET and GET_TIMERSLACK,
# SET and GET_NO_NEW_PRIVS, SET and GET_THP_DISABLE, SVE_GET_VL, GET_TAGGED_ADDR_CTRL, SME_GET_VL, SET_VMA
_PRCTLS = (2, 3, 15, 16, 21, 23, 29, 30, 38, 39, 41, 42, 51, 56, 64, 0x53564D41)
# SO_REUSEADDR, KEEPALIVE, LINGER, RCVTIMEO and SNDTIMEO. None that gives a program to the kernel. Neither SO_SNDBUF nor
# RCVBUF: no limit counts the memory that a socket holds.
_SOCKET_OPTIONS = (2, 9, 13, 20, 21, 66, 67)
# Of sockets of TCP also SO_BROADCAST, OOBINLINE, PRIORITY, REUSEPORT.
_TCP_SOCKET_OPTIONS = (*_SOCKET_OPTIONS, 6, 10, 12, 15)
# IPPROTO_TCP or the family's default, because Landlock does not restrict other stream protocols.
_TCP: dict[str, Alternatives] = {
    "socket": (((0, ALL_BITS, (2, 10)), (1, _SOCK_TYPE, (1,)), (2, ALL_BITS, (0, 6))),),
    "connect": (),
    "setsockopt": (
        _options(1, _TCP_SOCKET_OPTIONS),
        # IP_TOS, TTL, MTU_DISCOVER, RECVERR; IPV6_RECVERR, V6ONLY, TCLASS.
        _options(0, (1, 2, 10, 11)),
        _options(41, (25, 26, 67)),
        # TCP_NODELAY, MAXSEG, CORK, KEEPIDLE, KEEPINTVL, KEEPCNT, SYNCNT, LINGER2, DEFER_ACCEPT, WINDOW_CLAMP,
        # QUICKACK, USER_TIMEOUT, NOTSENT_LOWAT; not TCP_ULP, with which the kernel itself speaks other protocols.
        _options(6, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 18, 25)),
    ),
    # With this flag the call connects, past Landlock.
    "sendto": (((3, _MSG_FASTOPEN, (0,)),),),
    "sendmsg": (((2, _MSG_FASTOPEN, (0,)),),),
    "sendmmsg": (((3, _MSG_FASTOPEN, (0,)),),),
}
