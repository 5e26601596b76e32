"""Gives an instance the files and folders that its model was granted by name, with the rights of their owners.

Theory of operation. If the runtime is root, an instance runs as a private user U, and after a restart as another one.
So the modes of a granted folder cannot give it its rights: a folder that is open to others is open to all of them, and
a file that one instance wrote would belong to a user that the next instance is not. Therefore the folder is mounted
with its ids mapped. On this mount alone, the folder's owner O appears as U: files of O belong to U, and files that U
makes belong to O on the disk. No process ever has the id of O.

1. Each path is opened once, and no link in it is followed (`openat2`). Its owner, the copy of its mount and the rule of
   Landlock all come from that one descriptor. Another model may be able to write to a folder above it, and could
   otherwise put a link there at any moment, which leads to files that were not granted.
2. The mount is copied (`open_tree`). The copy, and the copies of mounts below it, know neither devices nor set-user-ID
   programs. Then the ids of the copy are mapped. Those of the mounts below it are not: their owners granted nothing.
3. The copies are put where the folders are (`move_mount`), outer ones first, in the instance's own mount namespace.

The rights of O end at the edge of the mount. Hard links and renames do not cross it, and symbolic links lead to places
where U has no rights. But O could set the set-user-ID bit of a file, which has its effect on the disk, for all users of
the machine. The filter for system calls forbids that (`rules.py`), and `contained.py` lends no folder without the
filter.

A sticky folder that is open to all, such as /tmp and /dev/shm, is not mapped: all users have files of their own there.

Source: `mount_setattr(2)`, `openat2(2)`, `open_tree(2)`, `move_mount(2)`, `user_namespaces(7)`.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from moonpool.ipc.policy import FIRST_SHARED_USER
from moonpool.stub.sandbox import kernel
from moonpool.stub.sandbox.outcome import SandboxRefused

# The name of the layer that is on if an instance has the rights of an owner.
LAYER = "granted_folders"
_AT_FDCWD, _EMPTY_PATH, _RECURSIVE = -100, 0x1000, 0x8000
_NO_MAGIC_LINKS, _NO_LINKS = 0x02, 0x04
# OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH and MOVE_MOUNT_T_EMPTY_PATH
_CLONE, _FROM_FD, _TO_FD = 1, 0x04, 0x40
_RDONLY, _NOSUID, _NODEV, _IDMAP = 1, 2, 4, 0x100000
_NEW_USER = 0x10000000
_PUBLIC = stat.S_ISVTX | stat.S_IWOTH
_MOST_BYTES = 64
# A model cannot own one of these folders, or one below.
_SYSTEM_S_BELOW = ("/bin", "/boot", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr")
# A model cannot own one of these, but one below.
_SYSTEM_S = ("/dev", "/home", "/opt", "/root", "/run", "/srv", "/var", "/var/lib", "/var/log")


class Granted:
    """One granted path. Owns descriptors until `close`. Only valid in the process and the mount namespace that made
    it.
    """

    def __init__(self, path: str, user: int | None, *, writes: bool, is_own: bool = False) -> None:
        """Open it, for an instance that will be `user`, or this process's own user if None. Raises `SandboxRefused`.

        `is_own` is true if it belongs to this process's user. In a user namespace `stat` cannot tell: all users without
        a name there look the same.
        """
        self.path = path
        self._is_own = is_own
        self.writes = writes
        self.fd = _opened_for(path)
        # True once the instance has the rights of the owner there; if not, `why_not` says why.
        self.is_lent = False
        self._user = user
        self._status = os.fstat(self.fd)
        self._tree = -1
        self._is_mapped = False
        self.why_not = "the runtime may not make mounts (it takes CAP_SYS_ADMIN)"

    @property
    def is_device(self) -> bool:
        """True for a character device."""
        return stat.S_ISCHR(self._status.st_mode)

    @property
    def _is_folder(self) -> bool:
        return stat.S_ISDIR(self._status.st_mode)

    @property
    def _is_plain(self) -> bool:
        return self._is_folder or stat.S_ISREG(self._status.st_mode)

    @property
    def _needs_owner(self) -> bool:
        """True if the instance is not the owner, and needs the owner's rights to use the path."""
        is_public = self._is_folder and self._status.st_mode & _PUBLIC == _PUBLIC
        is_owned = self._user is None or self._status.st_uid == self._user
        return self._is_plain and not is_public and not is_owned

    def copy_mount(self) -> None:
        """Copy the mount, and map its ids if the instance needs that. Raises OSError.

        If the kernel refuses the mapping alone, nothing is raised; then `check` may have to.
        """
        with _naming(self.path):
            flags = _CLONE | _EMPTY_PATH | _RECURSIVE | os.O_CLOEXEC
            self._tree = kernel.call("open_tree", self.fd, b"", flags)
        attributes = _NOSUID | (0 if self.writes else _RDONLY) | (_NODEV if self._is_plain else 0)
        try:
            _set(self._tree, _RECURSIVE, attributes)
            if self._needs_owner:
                self._map()
        except OSError as error:
            self.why_not = _in_words(error, self._mount("type"))

    def _map(self) -> None:
        if self._user is None:
            raise ValueError("an instance that is the runtime's own user has no ids to map")
        namespace = _namespace(
            _lines("uid_map", self._status.st_uid, self._user), _lines("gid_map", self._status.st_gid, self._user)
        )
        try:
            _set(self._tree, 0, _IDMAP, namespace)
        finally:
            os.close(namespace)
        self._is_mapped = True

    def attach(self) -> None:
        """Mount the copy over the path. Raises OSError, and `SandboxRefused` if the path has become a link."""
        place = _opened_for(self.path)
        try:
            with _naming(self.path):
                kernel.call("move_mount", self._tree, b"", place, b"", _FROM_FD | _TO_FD)
        finally:
            os.close(place)
        self.is_lent = self._is_mapped

    def check(self) -> None:
        """Raise `SandboxRefused` unless this process, which is now the instance's user, can use the path as granted.

        A writable folder has to be shared, too: each instance must be able to read the files of the others.
        """
        wanted = os.R_OK | (os.W_OK if self.writes else 0) | (os.X_OK if self._is_folder else 0)
        is_shared = not (self.writes and self._is_folder and self._needs_owner) or self.is_lent
        if is_shared and os.access(self.path, wanted):
            return
        me = os.geteuid()
        who = f"user {me}, which {'this instance' if self._user == me else 'the runtime'} is,"
        what = "share" if not is_shared else "write to" if self.writes else "read"
        why = f"{who} cannot {what} {self.path}"
        if self._needs_owner and not self.is_lent:
            why += f" as its owner, user {self._status.st_uid}: {self.why_not}"
        raise SandboxRefused("files", why, self._cure(me, is_shared=is_shared))

    def _cure(self, me: int, *, is_shared: bool) -> str:
        """Return the advice, with a command, by which the user `me` would get the granted rights."""
        closed = _closed_to_this_process(self.path)
        if closed:
            return f"let others pass the folders above it: {_command('chmod o+x', closed)}"
        if self.writes and os.statvfs(self.path).f_flag & os.ST_RDONLY:
            command = _command("mount -o remount,rw", self._mount("place"))
            return f"it is mounted read-only: {command}, or grant it without rw:"
        if not self._is_plain:
            letters = "rw" if self.writes else "r"
            return f"let others do so: {_command(f'chmod o+{letters}', self.path)}"
        if self.writes and _is_the_system_s(self.path):
            return "it is a folder of the system's: make one for the model alone, and grant that"
        if not is_shared:
            return f"give it to a user that instances share: {command_to_share(self.path)}"
        is_own = self._is_own if self._user is None else self._status.st_uid == self._user
        if self.is_lent or is_own:
            command = _command(f"chmod u+r{'w' if self.writes else ''}X", self.path)
            return f"let its owner do so: {command}"
        if self.writes and self._user is None:
            return f"make that user its owner: {_command(f'chown -R {me}', self.path)}"
        letters = "rwX" if self.writes else "rX"
        return f"let others do so: {_command(f'chmod -R o+{letters}', self.path)}"

    def _mount(self, what: str) -> str:
        """Return the place of the path's mount, or the type of its file system."""
        with open(f"/proc/self/fdinfo/{self.fd}", encoding="ascii") as file:
            (number,) = (line.split()[1] for line in file if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                words, _, more = line.partition(" - ")
                if words.split()[0] == number:
                    return words.split()[4] if what == "place" else more.split()[0]
        return self.path if what == "place" else "this"

    def close(self) -> None:
        """Close the descriptors. May be called many times."""
        for fd in (self.fd, self._tree):
            if fd >= 0:
                os.close(fd)
        self.fd = self._tree = -1


def owned(paths: Iterable[tuple[str, bool]]) -> set[str]:
    """Return the paths that belong to this process's user. Call it before a user namespace is entered."""
    found = set()
    for path, _ in paths:
        with suppress(OSError):  # `opened` will raise it
            if os.stat(path, follow_symlinks=False).st_uid == os.geteuid():
                found.add(path)
    return found


def opened(paths: Iterable[tuple[str, bool]], user: int | None, own: Container[str] = ()) -> list[Granted]:
    """Open all paths, outer folders before inner ones. If it raises `SandboxRefused`, none stays open.

    `own` are the paths from `owned`. Each path comes with True if it is writable. A path that is named twice is
    writable if it is so once.
    """
    named: dict[str, bool] = {}
    for path, writes in paths:
        named[path] = named.get(path, False) or writes
    found: list[Granted] = []
    with ExitStack() as held:
        for path in sorted(named):
            granted = Granted(path, user, writes=named[path], is_own=path in own)
            held.callback(granted.close)
            found.append(granted)
        held.pop_all()
    return found


def command_to_share(path: str) -> str:
    """Return the command that makes a user that instances share the owner of `path`."""
    return _command(f"chown -R {FIRST_SHARED_USER}:{FIRST_SHARED_USER}", path)


def closed_above(path: str, user: int) -> str:
    """Return the topmost folder above `path` that `user`, who is in no group, cannot pass; "" for none."""
    place = "/"
    for part in path.split("/")[1:]:
        status = os.stat(place)
        bit = stat.S_IXUSR if status.st_uid == user else stat.S_IXOTH
        if not status.st_mode & bit:
            return place
        place = os.path.join(place, part)
    return ""


def _closed_to_this_process(path: str) -> str:
    """Return the topmost folder above `path` that this process cannot pass; "" for none."""
    place = "/"
    for part in path.split("/")[1:]:
        if not os.access(place, os.X_OK):
            return place
        place = os.path.join(place, part)
    return ""


def _is_the_system_s(path: str) -> bool:
    """Return True if a command that gives all of it to others would break the machine."""
    return path in (*_SYSTEM_S, *_SYSTEM_S_BELOW) or path.startswith(tuple(f"{place}/" for place in _SYSTEM_S_BELOW))


def _opened(path: str) -> int:
    """Open `path` without following any link. Raises OSError."""
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, _NO_LINKS | _NO_MAGIC_LINKS)
    return kernel.call("openat2", _AT_FDCWD, os.fsencode(path), how, len(how))


def _opened_for(path: str) -> int:
    try:
        return _opened(path)
    except OSError as error:
        why = f"{path} cannot be opened ({error.strerror})"
        if error.errno == errno.ELOOP:
            raise SandboxRefused(
                "files",
                f"{path} is a link or lies behind one, which others may change",
                f"name the place itself in MOONPOOL_SANDBOX_PATHS: {os.path.realpath(path)}",
            ) from error
        if error.errno == errno.EACCES:
            closed = _closed_to_this_process(path)
            command = _command("chmod o+x", closed)
            raise SandboxRefused("files", why, f"let others pass: {command}") from error
        if error.errno == errno.ENOSYS:
            raise SandboxRefused("files", why, "use Linux 5.6 or later, or grant no paths") from error
        raise SandboxRefused("files", why, "make it, or grant it no more") from error


def _set(tree: int, flags: int, attributes: int, namespace: int = 0) -> None:
    values = struct.pack("=QQQQ", attributes, 0, 0, namespace)
    kernel.call("mount_setattr", tree, b"", _EMPTY_PATH | flags, values, len(values))


def _in_words(error: OSError, file_system: str) -> str:
    if error.errno == errno.ENOSYS:
        return "mounts with mapped ids take Linux 5.12"
    if error.errno == errno.EINVAL:
        return f"this kernel cannot map the ids of the file system {file_system}"
    if error.errno == errno.EPERM:
        return "to map its ids takes CAP_SYS_ADMIN outside of user namespaces, and ids that are not mapped yet"
    return f"its ids cannot be mapped ({error.strerror})"


def _lines(name: str, owner: int, user: int) -> str:
    """Return the text for a namespace's `uid_map` or `gid_map` that maps `owner` to `user`, and all other ids to
    themselves.

    No file belongs to `user`, so that id need not be mapped. Ids that this process itself cannot name are left out.
    """
    lines = [f"{owner} {user} 1"]
    with open(f"/proc/self/{name}", encoding="ascii") as file:
        for inside, _, count in (map(int, line.split()) for line in file):
            begin, end = inside, inside + count
            for cut in (*sorted({owner, user}), end):
                if begin <= cut <= end:
                    if cut > begin:
                        lines.append(f"{begin} {begin} {cut - begin}")
                    begin = cut + 1
    return "".join(f"{line}\n" for line in lines)


def _namespace(users: str, groups: str) -> int:
    """Make a user namespace with these maps, and return its descriptor. Raises OSError.

    Only a process can make a namespace, and only a process outside may write maps with other users. So a child makes
    it, and lives until this process has written the maps and opened the namespace.
    """
    answer_fd, telling_fd = os.pipe2(os.O_CLOEXEC)
    waiting_fd, life_fd = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _wait_in_a_namespace(telling_fd, waiting_fd, life_fd)
    try:
        os.close(telling_fd)
        telling_fd = -1
        answer = os.read(answer_fd, _MOST_BYTES).decode()
        if not answer.startswith("/"):
            code = int(answer or errno.ECHILD)
            raise OSError(code, f"there is no user namespace for it: {os.strerror(code)}")
        for name, text in (("uid_map", users), ("gid_map", groups)):
            with open(f"{answer}/{name}", "w", encoding="ascii") as file:
                file.write(text)
        return os.open(f"{answer}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (answer_fd, telling_fd, waiting_fd, life_fd):
            if fd >= 0:
                os.close(fd)
        os.waitpid(child, 0)


def _wait_in_a_namespace(telling_fd: int, waiting_fd: int, life_fd: int) -> None:
    """Run in the child: send its folder in /proc or an error number, then wait until the parent closes the other
    pipe.
    """
    try:
        os.close(life_fd)
        try:
            kernel.call("unshare", _NEW_USER)
            # The number of this process in the namespace of /proc, which may differ from its own.
            answer = f"/proc/{os.readlink('/proc/self')}"
        except OSError as error:
            answer = str(error.errno)
        os.write(telling_fd, answer.encode())
        os.read(waiting_fd, 1)
    finally:
        os._exit(0)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Add the path to an OSError from inside the block."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _command(command: str, path: str) -> str:
    import shlex

    return f"{command} {shlex.quote(path)}"
