"""Attempts on processes: its own, its runtime's, its siblings'."""

import ctypes
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading

from tries_kernel import LIBC, call


class Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def in_thread(function):
    """Call a function in a thread that ends at once, as a tracer lets go then. Returns or raises what it does."""
    caught = []

    def run():
        try:
            caught.append((function(), None))
        except OSError as error:
            caught.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = caught[0]
    if error is not None:
        raise error
    return result


def signal_to(pid):
    """Send signal 0, which only asks whether a signal may be sent."""
    os.kill(pid, 0)


def signal_number(pid, number):
    os.kill(pid, number)


def signal_to_group(pid):
    os.killpg(os.getpgid(pid), 0)


def signal_to_thread(pid):
    call("tgkill", pid, pid, 0)


def signal_with_value(pid):
    info = (ctypes.c_int * 32)(0, 0, -1)  # SI_QUEUE
    call("rt_sigqueueinfo", pid, 0, ctypes.byref(info))


def signal_by_descriptor(pid):
    fd = call("pidfd_open", pid, 0)
    try:
        call("pidfd_send_signal", fd, 0, None, 0)
    finally:
        os.close(fd)


def signal_by_ownership(pid):
    """Let the kernel send the signals of a descriptor to another process."""
    read_fd, write_fd = os.pipe()
    try:
        fcntl.fcntl(read_fd, fcntl.F_SETOWN, pid)
        fcntl.fcntl(read_fd, fcntl.F_SETFL, os.O_ASYNC)
    finally:
        os.close(read_fd)
        os.close(write_fd)


def trace(pid):
    """Try PTRACE_SEIZE, which does not stop the other process."""
    in_thread(lambda: call("ptrace", 0x4206, pid, 0, 0))


def read_memory(pid, address, size):
    buffer = ctypes.create_string_buffer(size)
    here = Iovec(ctypes.cast(buffer, ctypes.c_void_p), size)
    there = Iovec(address, size)
    call("process_vm_readv", pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return buffer.raw.decode()


def write_memory(pid, address, text):
    buffer = ctypes.create_string_buffer(text.encode(), len(text))
    here = Iovec(ctypes.cast(buffer, ctypes.c_void_p), len(text))
    there = Iovec(address, len(text))
    return call("process_vm_writev", pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)


def read_memory_file(pid, address, size):
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        file.seek(address)
        return file.read(size).decode()


def take_descriptor(pid, fd):
    pidfd = call("pidfd_open", pid, 0)
    try:
        taken = call("pidfd_getfd", pidfd, fd, 0)
    finally:
        os.close(pidfd)
    try:
        return os.pread(taken, 64, 0).decode()
    finally:
        os.close(taken)


def take_descriptor_by_path(pid, fd):
    with open(f"/proc/{pid}/fd/{fd}") as file:
        return file.read()


def read_environment(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().decode(errors="replace")


def read_of_process(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return len(file.read(64))


def list_of_process(pid, name):
    return len(os.listdir(f"/proc/{pid}/{name}"))


def _clock(pid):
    """Return the number of a process's clock of processor time."""
    time = (ctypes.c_long * 2)()
    return ~pid << 3 | 2, ctypes.byref(time)


def _capabilities(pid):
    header = (ctypes.c_uint32 * 2)(0x20080522, pid)
    call("capget", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _schedule(pid):
    call("sched_getattr", pid, ctypes.byref((ctypes.c_uint8 * 64)()), 64, 0)


def _interval(pid):
    call("sched_rr_get_interval", pid, ctypes.byref((ctypes.c_long * 2)()))


def _robust_list(pid):
    call("get_robust_list", pid, ctypes.byref(ctypes.c_void_p()), ctypes.byref(ctypes.c_size_t()))


# Calls that tell whether a process of a pid exists.
QUESTIONS = {
    "getpgid": os.getpgid,
    "getsid": os.getsid,
    "getpriority": lambda pid: os.getpriority(os.PRIO_PROCESS, pid),
    "sched_getaffinity": os.sched_getaffinity,
    "sched_getscheduler": os.sched_getscheduler,
    "sched_getparam": os.sched_getparam,
    "sched_getattr": _schedule,
    "sched_rr_get_interval": _interval,
    "ioprio_get": lambda pid: call("ioprio_get", 1, pid),
    "prlimit64": lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE),
    "get_robust_list": _robust_list,
    "capget": _capabilities,
    "clock_gettime": lambda pid: call("clock_gettime", *_clock(pid)),
    "clock_getres": lambda pid: call("clock_getres", *_clock(pid)),
    "timer_create": lambda pid: call("timer_create", _clock(pid)[0], None, _clock(pid)[1]),
    "kill": lambda pid: os.kill(pid, 0),
    "tgkill": lambda pid: call("tgkill", pid, pid, 0),
    "pidfd_open": lambda pid: os.close(call("pidfd_open", pid, 0)),
    "move_pages": lambda pid: call("move_pages", pid, 0, None, None, None, 0),
    "migrate_pages": lambda pid: call("migrate_pages", pid, 0, None, None),
    "setpgid": lambda pid: os.setpgid(pid, 1 << 21),
    "sched_setaffinity": lambda pid: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
}


def ask_about(question, pids):
    """Return the answer of a call for each of these pids."""
    answers = []
    for pid in pids:
        try:
            QUESTIONS[question](pid)
        except OSError as error:
            answers.append(errno.errorcode[error.errno])
        else:
            answers.append("done")
    return answers


def list_processes():
    return sum(name.isdigit() for name in os.listdir("/proc"))


def compare(pid):
    """Compare the kernel objects of two processes."""
    return call("kcmp", pid, os.getpid(), 1, 0, 0)


def limit(pid):
    """Set a limit of another process to its present value."""
    resource.prlimit(pid, resource.RLIMIT_CORE, resource.prlimit(pid, resource.RLIMIT_CORE))


def read_limit(pid):
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)


def raise_own_limit():
    """Set a hard limit of its own; below it a model may do as it likes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def slow_down(pid):
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0))


def hurry():
    os.setpriority(os.PRIO_PROCESS, 0, -5)


def pin_to(pid, cores):
    os.sched_setaffinity(pid, cores)


def ask_in_a_thread():
    """Ask as libraries do for each of their threads. Return what libc answers: 0, or an error number."""
    found = {}

    def ask():
        libc = ctypes.CDLL(None)
        libc.pthread_self.restype = ctypes.c_void_p
        me, policy, priority = (ctypes.c_void_p(libc.pthread_self()), ctypes.c_int(9), ctypes.c_int(9))
        mask, attributes = (ctypes.c_ulong * 16)(1), (ctypes.c_ulong * 16)()
        error = libc.pthread_getschedparam(me, ctypes.byref(policy), ctypes.byref(priority))
        found["pthread_getschedparam"] = [error, policy.value, priority.value]
        found["pthread_setschedparam"] = libc.pthread_setschedparam(me, 0, ctypes.byref(priority))
        found["pthread_setaffinity_np"] = libc.pthread_setaffinity_np(me, 128, mask)
        found["pthread_getaffinity_np"] = libc.pthread_getaffinity_np(me, 128, mask)
        found["pthread_getattr_np"] = libc.pthread_getattr_np(me, attributes)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found


def schedule(pid):
    os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))


def prioritise_io(pid):
    """Set the I/O priority: IOPRIO_WHO_PROCESS, best effort, lowest."""
    call("ioprio_set", 1, pid, (2 << 13) | 7)


def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def fork_twice():
    """Start a grandchild in a new session, which could outlive its parent."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        # The child in the middle ends, so no process of the model's notices if the grandchild stays.
        os.fork()
        os._exit(0)
    os.waitpid(pid, 0)


def vfork():
    subprocess.run([sys.executable, "-c", ""], check=True, close_fds=False)


def spawn():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)


def clone_without_thread():
    """Call clone without CLONE_THREAD, which makes a process."""
    pid = call("clone", signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def clone3_process():
    arguments = (ctypes.c_uint64 * 11)()
    arguments[4] = signal.SIGCHLD
    pid = call("clone3", ctypes.byref(arguments), ctypes.sizeof(arguments))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def execute_program(path="/bin/true"):
    """Run another program in this process. If that is allowed, this process cannot report it."""
    os.execv(path, [path])


def execute_memory():
    """Run a program that is in no file system."""
    fd = os.memfd_create("program")
    with open("/bin/true", "rb") as file:
        os.write(fd, file.read())
    os.execve(fd, ["true"], {})


def start_threads(count):
    """Start so many threads that do nothing; returns how many started."""
    stop = threading.Event()
    threads = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=stop.wait, daemon=True)
            thread.start()
            threads.append(thread)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return len(threads)


def become_root():
    os.setresuid(0, 0, 0)


def become_another():
    os.setresuid(1234, 1234, 1234)


def set_groups():
    os.setgroups([0])


def take_capabilities():
    """Try capset with all capabilities."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 3, *[0xFFFFFFFF] * 3)
    if LIBC.capset(ctypes.byref(header), ctypes.byref(data)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def start_session():
    """Leave the process group that the runtime would end."""
    os.setsid()


def join_group(pid):
    os.setpgid(0, os.getpgid(pid))


def fork_and_read(path):
    """Return the name of the error that a child gets, or "read"."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open(path, "rb"):
                os.write(write_fd, b"read")
        except OSError as error:
            os.write(write_fd, errno.errorcode[error.errno].encode())
        os._exit(0)
    os.close(write_fd)
    os.waitpid(pid, 0)
    with open(read_fd) as file:
        return file.read()
