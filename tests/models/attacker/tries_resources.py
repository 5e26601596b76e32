"""Attempts on resources that the kernel counts for all processes of a user, or not at all. Each returns how many it
got.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import tempfile
import threading

from tries_kernel import LIBC, call

# No model needs so many of anything.
MANY = 100_000
AF_UNIX, SOL_SOCKET, SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE = 1, 1, 7, 8, 32, 33
F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ, F_OFD_SETLK = 1024, 1026, 1031, 37


def taken(make, most):
    """Take resources until the kernel gives no more; returns their number."""
    made = []
    try:
        while len(made) < most:
            made.append(make())
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC):
            raise
    finally:
        for each in made:
            close = getattr(each, "close", None)
            if close:
                close()
            elif each is not None:
                os.close(each)
    return len(made)


def epoll_watches(most=1000):
    """Let each epoll watch every pipe."""
    pipes = [os.pipe()[0] for _ in range(10)]
    watches = 0
    while watches < most:
        epoll = select.epoll()
        for fd in pipes:
            epoll.register(fd, select.EPOLLIN)
            watches += 1
    return watches


def event_counters(most=MANY):
    return taken(lambda: call("eventfd2", 0, 0), most)


def timer_descriptors(most=MANY):
    return taken(lambda: call("timerfd_create", 1, 0), most)


def signal_descriptors(most=MANY):
    mask = ctypes.c_uint64(0)
    return taken(lambda: call("signalfd4", -1, ctypes.byref(mask), 8, 0), most)


def waiting_signals(most):
    """Queue signals, each of which is kept."""
    number = signal.SIGRTMIN + 3
    signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    signal.signal(number, signal.SIG_DFL)
    try:
        for sent in range(most):
            # The signal goes to this thread, because the others do not block it.
            call("tgkill", os.getpid(), threading.get_native_id(), number)
        return most
    except BlockingIOError:
        return sent
    finally:
        signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])


def inotify():
    os.close(call("inotify_init1", 0))


def message_queue():
    """Make a POSIX message queue, which stays when the process is gone."""
    name = b"moonpool-attacker"
    fd = call("mq_open", name, os.O_CREAT | os.O_RDWR, 0o600, None)
    call("mq_unlink", name)
    os.close(fd)


def system_v_queue():
    identifier = call("msgget", 0, 0o1600)
    LIBC.msgctl(identifier, 0, None)


def system_v_semaphore():
    identifier = call("semget", 0, 1, 0o1600)
    LIBC.semctl(identifier, 0, 0, 0)


def asynchronous_io():
    context = ctypes.c_ulong(0)
    call("io_setup", 128, ctypes.byref(context))
    LIBC.syscall(ctypes.c_long(207 if os.uname().machine == "x86_64" else 1), context)


def process_descriptor():
    os.close(call("pidfd_open", os.getpid(), 0))


def ruleset():
    """Ask for the version of Landlock, whose rules have no bound. Every use of it begins so."""
    return call("landlock_create_ruleset", None, 0, 1)


def lease():
    with tempfile.TemporaryFile() as file:
        fcntl.fcntl(file, F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, F_SETLEASE, fcntl.F_UNLCK)


def notification():
    fd = os.open(".", os.O_RDONLY)
    try:
        fcntl.fcntl(fd, F_NOTIFY, 1)
    finally:
        os.close(fd)


def locked_bytes(most, command=fcntl.F_SETLK):
    """Lock every second byte of one file."""
    with tempfile.TemporaryFile() as file:
        for place in range(most):
            lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 2 * (most - place), 1, 0)
            fcntl.fcntl(file, command, lock)
    return most


HELD = []


def hold_locks(most):
    """Lock every second byte of a file, and keep it open."""
    HELD[:] = [tempfile.TemporaryFile()]
    for place in range(most):
        lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 2 * place, 1, 0)
        fcntl.fcntl(HELD[0], fcntl.F_SETLK, lock)
    return most


def locked_bytes_of_descriptions(most):
    return locked_bytes(most, F_OFD_SETLK)


def locked_files(most=MANY):
    """Lock one file through as many descriptors as it may have."""

    with tempfile.NamedTemporaryFile() as shared:

        def one():
            file = open(shared.name)
            fcntl.flock(file, fcntl.LOCK_SH)
            return file

        return taken(one, most)


def lock_memory(count_bytes):
    """Lock so much memory."""
    with mmap.mmap(-1, count_bytes) as pages:
        at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        failed = LIBC.mlock(ctypes.c_void_p(at), ctypes.c_size_t(count_bytes))
        if failed:
            raise OSError(ctypes.get_errno(), "mlock")


def enlarge_pipe():
    ends = os.pipe()
    try:
        return fcntl.fcntl(ends[1], F_SETPIPE_SZ, 1 << 20)
    finally:
        for fd in ends:
            os.close(fd)


def enlarge_buffer(option):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(SOL_SOCKET, option, 4 << 20)


def send_descriptor():
    """Send a descriptor: while it waits in a socket, it does not count as one of the process."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [0])


def filled(ends, write):
    """Fill all ends; return the bytes that they hold."""
    held = 0
    for end in ends:
        try:
            while True:
                held += write(end)
        except BlockingIOError:
            continue
    return held


def bytes_in_sockets(enlarge=False, enough=4 << 30):
    """Fill pairs of sockets, as many as there can be or hold so much, keeping one end of each; return the bytes that
    they hold.
    """
    ends = []
    held = 0
    chunk = bytes(1 << 16)
    try:
        while True:
            ours, theirs = socket.socketpair()
            ends.append(theirs)
            if enlarge:
                ours.setsockopt(SOL_SOCKET, SO_SNDBUF, 8 << 20)
            ours.setblocking(False)
            held += filled([ours], lambda end: end.send(chunk))
            ours.close()
            if held > enough:
                return held
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return held
    finally:
        for end in ends:
            end.close()


def bytes_in_pipes():
    ends = []
    held = 0
    chunk = bytes(1 << 12)
    try:
        while True:
            read_fd, write_fd = os.pipe()
            ends.append(read_fd)
            os.set_blocking(write_fd, False)
            held += filled([write_fd], lambda end: os.write(end, chunk))
            os.close(write_fd)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return held
    finally:
        for end in ends:
            os.close(end)
