"""Attempts on its own process."""

import ctypes
import os
import pwd
import resource
import signal
import stat
import sys
import tempfile
import threading


def environment():
    return dict(os.environ)


def status():
    with open("/proc/self/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file)


def descriptors():
    """List the open descriptors: the kind of each, and whether it can be written."""
    found = {}
    for fd in range(4096):
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            continue
        found[fd] = stat.filemode(mode)[0]
    return found


def places():
    return {
        "cwd": os.getcwd(),
        "home": os.path.expanduser("~"),
        "tmp": tempfile.gettempdir(),
        "scratch_writable": os.access(os.getcwd(), os.W_OK),
        "path": sys.path,
        "umask": os.umask(0o077),
    }


def identity():
    return {"uids": os.getresuid(), "gids": os.getresgid(), "groups": os.getgroups()}


def flags():
    return {"isolated": sys.flags.isolated, "no_site": sys.flags.no_site, "modules": sorted(sys.modules)}


def name():
    return pwd.getpwuid(os.getuid()).pw_name


def threads():
    return [thread.name for thread in threading.enumerate()]


def limit(name):
    return resource.getrlimit(getattr(resource, name))


def nodes_of_gpus():
    """List descriptors of devices."""
    return [
        fd
        for fd, kind in descriptors().items()
        if kind in "cb" and os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia")
    ]


def core():
    """End in a way in which the kernel would write a core file."""
    os.kill(os.getpid(), signal.SIGQUIT)
    signal.pause()


def crash(how):
    if how == "exit":
        os._exit(7)
    if how == "SIGSEGV":
        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(how)


def hang(how):
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how == "spin":
        pass
    threading.Event().wait()


def raise_with_secrets():
    """Raise an error with a path and an address in it."""
    raise RuntimeError(f"cannot read /etc/moonpool/secret.key of {object()!r}")


def protect_from_oom():
    """Ask the machine to end other processes when it is short of memory."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000" if os.geteuid() == 0 else "0")


def rewrite_itself():
    """Write its own memory through /proc, which no protection of pages stops."""
    with open("/proc/self/mem", "r+b", buffering=0):
        pass


def tempfiles():
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
        return file.name
