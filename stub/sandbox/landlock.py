"""Landlock: limits the files, TCP ports, abstract sockets and signals of a process. Has the table of files that every
stub needs.

Rights belong to the file that a path leads to, not to its name, so links open nothing. The rules hold for the thread
that puts them on and for all threads and processes that it starts. So there must be no other thread yet. Source:
`landlock(7)` and `Documentation/userspace-api/landlock.rst`.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable

from moonpool.stub.sandbox import kernel

_GET_VERSION = 1
_PATH_BENEATH, _PORT = 1, 2

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
# MAKE_CHAR and MAKE_BLOCK
_MAKE_DEVICES = 1 << 6 | 1 << 11
READ = READ_FILE | READ_DIR
# The number of rights over files, by ABI.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 6: 16, 7: 16, 8: 16, 9: 17}
NEWEST = max(_RIGHTS)
"""The last version in the table. A newer kernel may know rights that are not taken away."""
# Connections to sockets by their paths. Nobody has this right.
_RESOLVE_UNIX = 1 << 16
CHANGE = (1 << _RIGHTS[NEWEST]) - 1 & ~(EXECUTE | _MAKE_DEVICES | _IOCTL_DEVICE | _RESOLVE_UNIX)
# The rights of programs that talk to a driver.
USE_DEVICE = READ_FILE | WRITE_FILE | _IOCTL_DEVICE
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE | _IOCTL_DEVICE

_BIND, _CONNECT = 1, 2
# Abstract sockets and signals.
_SCOPES = 3

KNOWS_TRUNCATE, KNOWS_PORTS, KNOWS_SCOPES = 3, 4, 6


def abi() -> int:
    """Return the version of Landlock that the kernel has; 0 for none."""
    try:
        return kernel.call("landlock_create_ruleset", None, 0, _GET_VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


def restrict(version: int, paths: Iterable[tuple[str | int, int]], ports: Iterable[int]) -> None:
    """Leave this thread only these rights over the files at these paths, and connections to these ports.

    A number in place of a path is a descriptor, which stays open. Missing files are skipped, and so are ports if this
    version does not know ports. Needs no_new_privs. Raises OSError, with the path if one was the reason.
    """
    handled = (1 << _RIGHTS[min(version, NEWEST)]) - 1
    words = [handled]
    if version >= KNOWS_PORTS:
        words.append(_BIND | _CONNECT)
    if version >= KNOWS_SCOPES:
        words.append(_SCOPES)
    ruleset = kernel.call("landlock_create_ruleset", struct.pack(f"={len(words)}Q", *words), 8 * len(words), 0)
    try:
        for path, rights in paths:
            _allow(ruleset, path, rights & handled)
        for port in ports if version >= KNOWS_PORTS else ():
            kernel.call("landlock_add_rule", ruleset, _PORT, struct.pack("=QQ", _CONNECT, port), 0)
        kernel.call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str | int, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC) if isinstance(path, str) else path
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        # A rule for a file must not name rights over folders.
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        kernel.call("landlock_add_rule", ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        if isinstance(path, str):
            os.close(fd)


OWN_THREADS = "/proc/self/task"
_USUAL = (
    # For discarded output, zeros and random bytes.
    ("/dev/null", READ_FILE | WRITE_FILE),
    ("/dev/zero", READ_FILE | WRITE_FILE),
    ("/dev/full", READ_FILE | WRITE_FILE),
    ("/dev/random", READ),
    ("/dev/urandom", READ),
    # Numerical libraries choose their code, and the number of their threads, by the processor.
    ("/proc/cpuinfo", READ),
    ("/sys/devices/system/cpu", READ),
    ("/sys/devices/system/node", READ),
    # joblib counts the processors that its control group may use, and fails where it may not read this.
    ("/sys/fs/cgroup/cpu.max", READ),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", READ),
    ("/sys/fs/cgroup/cpu/cpu.cfs_period_us", READ),
    # ONNX Runtime lists the cards, and logs an error where it may not. The list has links, which lead to nothing that
    # can be read.
    ("/sys/bus/pci/devices", READ),
    # Allocators ask how much memory there is, and how the kernel gives it out.
    ("/proc/meminfo", READ),
    ("/proc/sys/vm/overcommit_memory", READ),
    ("/sys/kernel/mm/transparent_hugepage", READ),
    # A process measures itself, and libc finds the bounds of the first thread's stack.
    ("/proc/self/status", READ),
    ("/proc/self/stat", READ),
    ("/proc/self/statm", READ),
    ("/proc/self/maps", READ),
    # The dynamic loader.
    ("/etc/ld.so.cache", READ),
    # Local time, and the names of time zones.
    ("/etc/localtime", READ),
    ("/etc/timezone", READ),
    ("/usr/share/zoneinfo", READ),
    # OpenSSL reads them when Python's hashlib or ssl is imported.
    ("/etc/ssl/openssl.cnf", READ),
    ("/etc/pki/tls/openssl.cnf", READ),
    # Formats of numbers and texts.
    ("/usr/lib/locale", READ),
    ("/usr/share/locale", READ),
)
_NETWORK = (
    # libc resolves names.
    ("/etc/resolv.conf", READ),
    ("/etc/hosts", READ),
    ("/etc/host.conf", READ),
    ("/etc/nsswitch.conf", READ),
    ("/etc/gai.conf", READ),
    ("/etc/services", READ),
    # The certificates that TLS trusts.
    ("/etc/ssl/certs", READ),
    ("/etc/ssl/cert.pem", READ),
    ("/etc/pki/tls/certs", READ),
    ("/usr/share/ca-certificates", READ),
    ("/usr/local/share/ca-certificates", READ),
)

_GPU = (
    # CUDA's libraries find the cards, and the processors near them.
    ("/proc/driver/nvidia", READ),
    ("/proc/driver/nvidia-uvm", READ),
    ("/sys", READ),
    ("/proc/devices", READ),
    ("/proc/sys/vm/mmap_min_addr", READ),
    # From version 570 on, the driver names its threads, and does not work if it may not.
    (OWN_THREADS, READ | WRITE_FILE),
)


def pinned_files(*, gpu: bool = False) -> list[str]:
    """Return the files that must be kept open. Under memory pressure, the kernel forgets them and makes them anew.

    A rule of Landlock belongs to the old file, and would be lost. An open descriptor keeps the file.
    """
    table = [*_USUAL, *(_GPU if gpu else ())]
    return [path for path, _ in table if path.startswith("/proc/")]


def usual_files(*, network: bool, gpu: bool = False) -> list[tuple[str, int]]:
    """Return paths with the rights over them. Not all exist on every machine. Nothing in them is secret."""
    return [*_USUAL, *(_NETWORK if network else ()), *(_GPU if gpu else ())]
