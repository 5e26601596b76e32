"""Attempts on files."""

import ctypes
import os
import struct
import tempfile

from tries_kernel import LIBC


def read(path):
    with open(path, "rb") as file:
        return len(file.read(64))


def listing(path):
    return len(os.listdir(path))


def open_to_write(path):
    os.close(os.open(path, os.O_WRONLY))


def create(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    os.unlink(path)


def create_unnamed(folder):
    os.close(os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o600))


def truncate(path):
    os.truncate(path, os.stat(path).st_size)


def unlink(path):
    os.unlink(path)


def rename(path, to):
    os.rename(path, to)


def make_folder(path):
    os.mkdir(path)
    os.rmdir(path)


def make_device(path):
    """Make a device file for the machine's memory."""
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 1))
    os.unlink(path)


def make_pipe(path):
    os.mkfifo(path)
    os.unlink(path)


def write(path, text):
    with open(path, "w") as file:
        return file.write(text)


def replace(path, text):
    """Write a new file that only its owner can read, and put it in the place of the old one, as careful programs do."""
    fd, name = tempfile.mkstemp(dir=os.path.dirname(path))
    with open(fd, "w") as file:
        file.write(text)
    os.rename(name, path)


def flags_of_mount(path):
    return os.statvfs(path).f_flag


def set_mode(path, mode):
    os.chmod(path, mode)
    return os.stat(path).st_mode & 0o7777


def make_with_mode(path, mode):
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, mode))
    return os.stat(path).st_mode & 0o7777


def make_with_old_call(path, mode):
    if LIBC.creat(path.encode(), mode) < 0:
        raise OSError(ctypes.get_errno(), "creat")


def make_unnamed_with_mode(folder, mode):
    os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY, mode))


def give_to(path, user):
    os.chown(path, user, user)


def set_capability(path):
    """Give a file cap_setuid for everybody who runs it: VFS_CAP_REVISION_2 with the effective bit."""
    os.setxattr(path, "security.capability", struct.pack("<5I", 0x02000001, 1 << 7, 0, 0, 0))


def change_mode(path):
    os.chmod(path, os.stat(path).st_mode & 0o7777)


def change_owner(path):
    os.chown(path, os.geteuid(), -1)


def change_times(path):
    os.utime(path)


def set_attribute(path):
    os.setxattr(path, "user.moonpool", b"x")
    os.removexattr(path, "user.moonpool")


def link(path, to):
    """Make a hard link to a file of another user."""
    os.link(path, to)
    os.unlink(to)


def read_by_symlink(path):
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "symlink")
        os.symlink(path, name)
        return read(name)


def read_from_root(path):
    """Read a file through the root folder of this very process."""
    return read("/proc/self/root" + path)


def read_by_dots(path):
    return read(os.path.join(os.getcwd(), *[".."] * 32, path.lstrip("/")))


def watch(path):
    """Watch the accesses of other processes to a file."""
    fd = LIBC.inotify_init1(0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    try:
        if LIBC.inotify_add_watch(fd, path.encode(), 0xFFF) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")
    finally:
        os.close(fd)


def go_to(path):
    """Change the working directory, and open a file there by its bare name."""
    before = os.getcwd()
    os.chdir(os.path.dirname(path))
    try:
        return read(os.path.basename(path))
    finally:
        os.chdir(before)


def change_root(path):
    os.chroot(path)


def fill(count_bytes):
    """Write so much into one file, and remove it."""
    path = os.path.join(os.getcwd(), "filled")
    written = 0
    try:
        with open(path, "wb", buffering=0) as file:
            while written < count_bytes:
                written += file.write(bytes(1 << 20))
    finally:
        os.unlink(path)
    return written


def fill_in_many(count_bytes, file_bytes):
    """Write so much into files of a size, and remove them."""
    paths = []
    written = 0
    try:
        while written < count_bytes:
            paths.append(os.path.join(os.getcwd(), str(len(paths))))
            with open(paths[-1], "wb", buffering=0) as file:
                while written % file_bytes or os.path.getsize(paths[-1]) == 0:
                    written += file.write(bytes(min(1 << 20, file_bytes)))
    finally:
        for path in paths:
            os.unlink(path)
    return written


def keep(name):
    """Write a file that stays, and return its path."""
    with open(name, "w") as file:
        file.write("kept")
    return os.path.abspath(name)


def many_empty(count):
    """Make so many empty folders."""
    made = 0
    try:
        for number in range(count):
            os.mkdir(str(number))
            made += 1
    finally:
        for number in range(made):
            os.rmdir(str(number))
    return made


def fill_and_keep(count_bytes):
    with open("full", "wb", buffering=0) as file:
        return file.write(bytes(count_bytes))
