"""Reads lists of packages, of which environments are built: what may be in one, and which environment it names.

A list stands alone. A line that names another file, a folder or a repository of sources is refused, because the list's
digest is the name of its environment, and would not change with them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.process.files import read_file

_MOST_BYTES = 16 << 20
# The name of a lock, and of the project that it is of.
LOCK, PROJECT = "uv.lock", "pyproject.toml"
# The block of https://packaging.python.org/en/latest/specifications/inline-script-metadata/.
_BEGIN, _END = "# /// script", "# ///"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What a requirement may be: a name, extras, versions, a marker. Only characters that these need: pip takes
# "file:%2Ftmp" for an address, "x[/../tmp]" for a folder, whose code it runs, ${X} for a variable, and ends a line at
# more characters than "\n". pip also takes an option wherever a dash follows a space, even in the quotes of a marker.
_VERSION = r"(?:===|~=|==|!=|<=|>=|<|>)[ \t]*[A-Za-z0-9][A-Za-z0-9.*+!_-]*[ \t]*"
_VERSIONS = rf"{_VERSION}(?:,[ \t]*{_VERSION})*(?:,[ \t]*)?"
_REQUIREMENT = re.compile(
    r"(?!.*[ \t]-)"
    rf"{_NAME.pattern}[ \t]*"
    r"(?:\[[A-Za-z0-9._, \t-]*\][ \t]*)?"
    rf"(?:{_VERSIONS}|\([ \t]*{_VERSIONS}\)[ \t]*)?"
    r"(?:;[A-Za-z0-9.*+!_,<>=~()'\" \t-]*)?"
)
# Names that pip takes for a file, if there is one in its working directory.
_ARCHIVE = re.compile(r".*\.(?:whl|zip|tar|t(?:ar\.)?(?:gz|bz|bz2|xz|lz|lzma))", re.IGNORECASE)
# pip and uv end a line at several characters, and `strip` takes them off.
_LINE = re.compile(r"[ -~\t]*")
_HASH = re.compile(r"hash=[a-z0-9]+:[0-9A-Fa-f]+")
# The length of a requirement without its hashes, and with them.
_LONGEST, _LONGEST_LINE = 1000, 1 << 16
_CLAUSE = re.compile(r"\s*(~=|==|!=|<=|>=|<|>)\s*([0-9]{1,9}(?:\.[0-9]{1,9})*)(\.\*)?\s*")


@dataclass(frozen=True, slots=True)
class PackageList:
    """The packages of an environment. `python` has the versions of Python that it may have, "" for any.

    `requirements` are lines for pip, and for a lock the text of the lock, which only uv reads, with that of its
    project.
    """

    path: Path
    requirements: tuple[str, ...]
    python: str = ""
    # The texts of a lock and of its project.
    lock: tuple[str, str] | None = None

    @property
    def has_hashes(self) -> bool:
        """True if each package is given with the hashes of its files."""
        return any("--hash=" in line for line in self.requirements)

    def digest(self, *, only_wheels: bool) -> str:
        """Return the name of the environment in the cache: of what was asked for, and of the Python that asks."""
        version = sys.implementation.cache_tag, sysconfig.get_platform()
        named = [self.requirements, self.python, self.lock, only_wheels, version]
        return hashlib.sha256(json.dumps(["list", named]).encode()).hexdigest()


def read_list(path: Path) -> PackageList:
    """Read a list. Raises `BadEnvironment` for one that cannot be read, that does not stand alone, or that cannot hold
    a stub.
    """
    try:
        text = _text(path)
        if path.suffix == ".lock":
            project = _text(path.with_name(PROJECT))
            return PackageList(path, (), _of_project(project)[1], lock=(text, project))
        if path.suffix == ".toml":
            found = PackageList(path, *_of_project(text))
        elif path.suffix == ".py":
            found = PackageList(path, *_of_table(_toml(_block(text)), "the block `# /// script`"))
        else:
            found = PackageList(path, _of_lines(text))
        return _with_numpy(found)
    except BadEnvironment as error:
        raise BadEnvironment(f"the list of packages {path}: {error}") from None


def _text(path: Path) -> str:
    try:
        return read_file(path, _MOST_BYTES).decode()
    except OSError as error:
        raise BadEnvironment(f"{path.name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadEnvironment(f"{path.name} is not UTF-8: {error}") from error


def _block(text: str) -> str:
    lines = text.splitlines()
    begins = [number for number, line in enumerate(lines) if line.rstrip() == _BEGIN]
    if len(begins) != 1:
        what = "no block" if not begins else f"{len(begins)} blocks"
        raise BadEnvironment(f"it has {what} `{_BEGIN}`, and must have one, with `dependencies`, up to a line `{_END}`")
    inside: list[str] = []
    for line in lines[begins[0] + 1 :]:
        if line.rstrip() == _END:
            return "\n".join(inside)
        if line != "#" and not line.startswith("# "):
            break
        inside.append(line[2:])
    raise BadEnvironment(f"the block `{_BEGIN}` has no end: a line `{_END}`")


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of a number with too many digits
        raise BadEnvironment(f"what should be TOML is not: {error}") from error


def _of_project(text: str) -> tuple[tuple[str, ...], str]:
    project = _toml(text).get("project")
    if not isinstance(project, dict):
        raise BadEnvironment(f"{PROJECT} has no [project]")
    return _of_table(project, "[project]")


def bare_project(text: str) -> str:
    """Return a project with no more than uv needs beside its lock: without settings for uv. Raises `BadEnvironment`."""
    table = _toml(text).get("project")
    name = table.get("name") if isinstance(table, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadEnvironment(f"`name` in {PROJECT} must be the name of a project")
    python = _of_project(text)[1]
    versions = f'requires-python = "{python}"\n' if python else ""
    return f'[project]\nname = "{name}"\nversion = "0"\n{versions}'


def _of_table(table: dict[str, Any], where: str) -> tuple[tuple[str, ...], str]:
    """Return the requirements and the versions of Python of a project or a block."""
    wanted, python = table.get("dependencies", []), table.get("requires-python", "")
    if not isinstance(wanted, list) or not all(isinstance(each, str) for each in wanted):
        raise BadEnvironment(f"`dependencies` of {where} must be a list of texts")
    if not isinstance(python, str) or not all(map(_CLAUSE.fullmatch, filter(None, python.split(",")))):
        raise BadEnvironment(
            f"`requires-python` of {where} must be versions such as '>=3.10,<3.14', not {python!r:.200}"
        )
    return tuple(_checked(each) for each in wanted), python


def _of_lines(text: str) -> tuple[str, ...]:
    """Return the requirements of a file for pip, without comments and with continued lines in one."""
    lines = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        plain = re.sub(r"(^|\s)#.*", "", line).strip()
        if plain:
            lines.append(_checked(plain))
    return tuple(lines)


def _checked(line: str) -> str:
    line = line.strip(" \t\n")
    requirement, *options = (part.strip() for part in re.split(r"[ \t]--", line[:_LONGEST_LINE]))
    shown = f"{line:.200}"
    if line.startswith("-"):
        what = "options are given to pip and uv by their variables, such as PIP_INDEX_URL and UV_INDEX_URL"
        raise BadEnvironment(f"{shown!r} is an option; {what}, and a list names all packages itself")
    if max(len(requirement) / _LONGEST, len(line) / _LONGEST_LINE) > 1:
        raise BadEnvironment(f"{shown!r} is longer than any requirement")
    name = _NAME.match(requirement)
    is_one_line = _LINE.fullmatch(line) is not None
    if name is None or not is_one_line or not _REQUIREMENT.fullmatch(requirement):
        raise BadEnvironment(f"{shown!r} is not the name of a package with versions")
    if _ARCHIVE.fullmatch(name[0]):
        raise BadEnvironment(f"{shown!r} is the name of a file, and a list has names of packages")
    if others := [each for each in options if not _HASH.fullmatch(each)]:
        raise BadEnvironment(f"{shown!r} has an option other than --hash: --{others[0]:.200}")
    return line


def _with_numpy(found: PackageList) -> PackageList:
    """Add numpy, which every stub needs, unless the list has it."""
    names = (_NAME.match(line) for line in found.requirements)
    if any(name is not None and name[0].lower() == "numpy" for name in names):
        return found
    if found.has_hashes:
        raise BadEnvironment("it has hashes but no numpy, which every model needs: add it")
    return PackageList(found.path, (*found.requirements, "numpy"), found.python)


def fits(version: tuple[int, ...], wanted: str) -> bool:
    """Tell if a version is among those of `requires-python`."""
    return all(_fits(version, clause) for clause in wanted.split(",") if clause.strip())


def _fits(version: tuple[int, ...], clause: str) -> bool:
    found = _CLAUSE.fullmatch(clause)
    if found is None:
        return False
    sign, number, is_prefix = found[1], tuple(map(int, found[2].split("."))), bool(found[3])
    # A version without its last numbers has zeros there.
    length = max(len(version), len(number))
    mine, given = _padded(version, length), _padded(number, length)
    if sign == "~=":
        return mine >= given and mine[: len(number) - 1] == number[:-1]
    if sign in ("==", "!="):
        is_equal = mine[: len(number)] == number if is_prefix else mine == given
        return is_equal == (sign == "==")
    return {"<": mine < given, "<=": mine <= given, ">": mine > given, ">=": mine >= given}[sign]


def _padded(version: tuple[int, ...], length: int) -> tuple[int, ...]:
    return version + (0,) * (length - len(version))
