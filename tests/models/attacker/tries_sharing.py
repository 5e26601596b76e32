"""Attempts on shared memory, and on what processes of a model send to its stub."""

import mmap
import os
import socket
import time
from multiprocessing import get_context, shared_memory

KEPT = []


def names():
    return sorted(os.listdir("/dev/shm"))


def keep(name, text):
    """Keep a named block of shared memory, and a semaphore."""
    block = shared_memory.SharedMemory(name, create=True, size=len(text))
    block.buf[: len(text)] = text.encode()
    KEPT[:] = [block, get_context("spawn").Lock()]
    return names()


def read(name):
    with open(f"/dev/shm/{name}", "rb") as file:
        return file.read().decode()


def fill(count_bytes):
    """Fill shared memory by writing, in files of a mebibyte."""
    for number in range(count_bytes >> 20):
        with open(f"/dev/shm/full{number}", "wb", buffering=0) as file:
            written = 0
            while written < 1 << 20:
                written += file.write(bytes(min(1 << 16, (1 << 20) - written)))
    return count_bytes


def touch(count_bytes):
    """Write to a mapping of a file for which there may be no room."""
    with open("/dev/shm/mapped", "w+b") as file:
        file.truncate(count_bytes)
        area = mmap.mmap(file.fileno(), count_bytes)
        for place in range(0, count_bytes, mmap.PAGESIZE):
            area[place] = 1
    return count_bytes


def many_empty(count):
    for number in range(count):
        os.close(os.open(f"/dev/shm/empty{number}", os.O_CREAT | os.O_WRONLY))
    return count


def leave_by_dots():
    """Look for the folders beside shared memory, by its descriptor and by dots."""
    fd = os.open("/dev/shm", os.O_RDONLY)
    try:
        return os.listdir(os.open("..", os.O_RDONLY, dir_fd=fd))
    finally:
        os.close(fd)


def program():
    """Leave a program with the set-user-ID bit, or else one that can be executed, in shared memory, and start it."""
    with open("/dev/shm/program", "wb") as file:
        file.write(b"#!/bin/sh\n")
    os.chmod("/dev/shm/program", 0o4755)


def device():
    os.mknod("/dev/shm/device", 0o20666, os.makedev(1, 1))


def connect_unix(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def datagram():
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).close()


def own_service():
    """Talk to itself by a socket with a name."""
    path = f"{os.environ['TMPDIR']}/service"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        client.connect(path)
        os.unlink(path)
        with server.accept()[0] as other:
            client.send(b"x")
            return other.recv(1).decode()


def flood_from_a_fork(denials, garbage, seconds):
    """Let a fork be refused often, and send the stub what makes no sense; return when it has ended."""
    from moonpool.stub.hosts import descriptors, forks
    from moonpool.stub.pb_utils import host
    from moonpool.stub.sandbox.denials import denials as refused

    pid = os.fork()
    if pid == 0:
        try:
            for _ in range(denials):
                try:
                    os.listdir("/home")
                except OSError:
                    pass
            broker = host.current()._broker
            for wish in (b"\0", b"\1", b"\2"):
                ours = forks._knock(broker, wish)
                for _ in range(garbage):
                    try:
                        ours.send(os.urandom(64), socket.MSG_DONTWAIT)
                    except OSError:
                        break
                KEPT.append(ours)
            for _ in range(garbage):
                try:
                    refused._to_stub.send(b"\xff" + os.urandom(32), socket.MSG_DONTWAIT)
                except OSError:
                    pass
            shelf = descriptors._Current.place
            try:
                for _ in range(2000):
                    shelf.put(os.urandom(16), os.dup(0))
            except OSError:
                pass
        finally:
            os._exit(0)
    end = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, 9)
        time.sleep(0.01)
    return True
