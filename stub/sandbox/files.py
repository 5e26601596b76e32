"""Files that every Python process needs beside its interpreter and its model: one table, each line with its reason."""

from __future__ import annotations

from moonpool.stub.sandbox.landlock import READ, READ_FILE, WRITE_FILE

OWN_THREADS = "/proc/self/task"
_USUAL = (
    # Where output goes that nobody wants, and where zeros and random bytes come from.
    ("/dev/null", READ_FILE | WRITE_FILE),
    ("/dev/zero", READ_FILE | WRITE_FILE),
    ("/dev/full", READ_FILE | WRITE_FILE),
    ("/dev/random", READ),
    ("/dev/urandom", READ),
    # Libraries for numbers choose their code, and how many threads they begin, by the processor.
    ("/proc/cpuinfo", READ),
    ("/sys/devices/system/cpu", READ),
    ("/sys/devices/system/node", READ),
    # Allocators ask how much there is, and how the kernel gives it out.
    ("/proc/meminfo", READ),
    ("/proc/sys/vm/overcommit_memory", READ),
    ("/sys/kernel/mm/transparent_hugepage", READ),
    # What a process measures of itself, and where libc finds the bounds of the first thread's stack.
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
    # What OpenSSL reads when Python's hashlib or ssl is imported.
    ("/etc/ssl/openssl.cnf", READ),
    ("/etc/pki/tls/openssl.cnf", READ),
    # How numbers and texts are written.
    ("/usr/lib/locale", READ),
    ("/usr/share/locale", READ),
)
_NETWORK = (
    # How libc resolves names.
    ("/etc/resolv.conf", READ),
    ("/etc/hosts", READ),
    ("/etc/host.conf", READ),
    ("/etc/nsswitch.conf", READ),
    ("/etc/gai.conf", READ),
    ("/etc/services", READ),
    # Whom TLS trusts.
    ("/etc/ssl/certs", READ),
    ("/etc/ssl/cert.pem", READ),
    ("/etc/pki/tls/certs", READ),
    ("/usr/share/ca-certificates", READ),
    ("/usr/local/share/ca-certificates", READ),
)

_GPU = (
    # Where CUDA's libraries find the cards, and which processors are near them.
    ("/proc/driver/nvidia", READ),
    ("/proc/driver/nvidia-uvm", READ),
    ("/sys", READ),
    ("/proc/devices", READ),
    ("/proc/sys/vm/mmap_min_addr", READ),
    # From version 570 on, the driver names the threads that it begins, and does not work where it may not.
    (OWN_THREADS, READ | WRITE_FILE),
)


def pinned_files(*, gpu: bool = False) -> list[str]:
    """Those that the kernel makes anew once it has forgotten them, under memory pressure: a rule is for the old ones.

    They stay as they are while somebody holds a descriptor of them.
    """
    table = [*_USUAL, *(_GPU if gpu else ())]
    return [path for path, _ in table if path.startswith("/proc/")]


def usual_files(*, network: bool, gpu: bool = False) -> list[tuple[str, int]]:
    """Paths with the rights over them; not all are there on every machine. Nothing in them is a secret."""
    return [*_USUAL, *(_NETWORK if network else ()), *(_GPU if gpu else ())]
