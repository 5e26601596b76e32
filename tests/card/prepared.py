"""The folder that goes with the tree to a machine with a card: packages that it may lack, and files that are compiled.

    bash .ci/gpu prepare [FOLDER]

makes it elsewhere, with a network and a compiler. On the machine with the card, `.ci/gpu` uses it if it is there, and
goes on without it. Compiled files serve one tree alone, as each has the checksum of its sources.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Git ignores it.
USUAL = ROOT / "build" / "card"
# Names another folder than the usual one.
VARIABLE = "MOONPOOL_CARD_PREPARED"
# Dependencies of moonpool's that images for PyTorch do not have.
PACKAGES = ("httptools", "orjson", "posix_ipc", "python-rapidjson", "tritonclient")
# The Python of such a machine. Its C library is Debian 12's or a newer one.
PYTHON, NEWEST_GLIBC = "3.12", 36
MOST_BYTES = 60 << 20
_CHECKSUMS = "checksums.json"


def place() -> Path:
    """Return the folder that this run uses, whether it is there or not."""
    return Path(os.environ.get(VARIABLE) or USUAL)


def packages() -> Path:
    """Return the folder of packages, for Python's path."""
    return place() / "packages"


def checksum(module: str) -> str:
    """Return the checksum of the sources of a compiled module, as they are in this tree."""
    found = runpy.run_path(str(ROOT / "src/moonpool/ipc/extension/__init__.py"))
    return str(found["checksum"](module))


def put_into_tree() -> list[str]:
    """Put the compiled files beside their sources, and return why any was left out. A file of this tree's own stays."""
    built = place() / "built"
    why = []
    try:
        checksums = json.loads((built / _CHECKSUMS).read_text())
        for file, (module, expected) in sorted(checksums.items()):
            # A tree that has no such module has no sources of it, either.
            if checksum(module) != expected:
                why.append(f"{file} was compiled from other sources than this tree's")
            else:
                _put(built / file, ROOT / "src" / "moonpool" / file)
    except FileNotFoundError as error:
        if built.exists():
            why.append(f"{error.filename} is missing")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # What is wrong with the folder, or a tree that nothing can be written to, costs what is compiled and nothing
        # else.
        why.append(f"what is compiled could not be put into the tree: {error}")
    return why


def _put(file: Path, target: Path) -> None:
    if target.exists() and target.read_bytes() == file.read_bytes():
        return
    # A running process may have mapped the old one.
    made = target.with_name(f".{target.name}-{os.getpid()}")
    shutil.copy(file, made)
    os.replace(made, target)


def misfit() -> str:
    """Return why this Python cannot use the packages, empty if it can. It would find them, and fail to load them."""
    names = (path.name for path in packages().rglob("*.cpython-*.so"))
    has = {found[1] for name in names if (found := re.search(r"\.cpython-(\d+)-", name))}
    own = f"{sys.version_info[0]}{sys.version_info[1]}"
    if not has or own in has:
        return ""
    return f"the packages are for CPython {', '.join(sorted(has))}, and this is {own}"


def prepare(folder: Path, python: str) -> None:
    """Fill the folder. Raises `SystemExit` with what to do."""
    for part in ("packages", "built"):
        shutil.rmtree(folder / part, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    _install(folder / "packages", python)
    _copy_built(folder / "built")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise SystemExit(f"{folder} has {size >> 20} MiB, more than {MOST_BYTES >> 20}")
    print(f"{folder} has {size / (1 << 20):.1f} MiB: {', '.join(PACKAGES)} for Python {python}, and")
    print("\n".join(sorted(json.loads((folder / "built" / _CHECKSUMS).read_text()))))


def _install(target: Path, python: str) -> None:
    platforms = ["manylinux1", "manylinux2010", "manylinux2014"]
    platforms += [f"manylinux_2_{version}" for version in range(5, NEWEST_GLIBC + 1)]
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--no-compile", "--only-binary=:all:", "--implementation=cp",
        f"--python-version={python}", f"--target={target}",
        *(f"--platform={each}_x86_64" for each in platforms), *PACKAGES,
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"pip could not get {', '.join(PACKAGES)}: this needs pip and a network")


def _copy_built(target: Path) -> None:
    # This file of setuptools also says how nghttp2 is found.
    build = runpy.run_path(str(ROOT / "setup.py"))
    modules = [each.name for each in build["EXTENSIONS"]]
    if _is_missing(modules):
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(command, cwd=ROOT, check=False)
    if why := _is_missing(modules):
        raise SystemExit(f"not everything could be compiled, which needs a C++ compiler: {why}")
    checksums = {}
    for module in modules:
        file = f"{module.removeprefix('moonpool.').replace('.', '/')}.abi3.so"
        checksums[file] = (module, checksum(module))
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src" / "moonpool" / file, target / file)
        if module == build["HTTP2"]:
            build["bundle"]((target / file).parent)
            library = (target / file).with_name(build["NGHTTP2"])
            if library.exists():
                checksums[str(library.relative_to(target))] = (module, checksum(module))
    (target / _CHECKSUMS).write_text(json.dumps(checksums, indent=1))


def _is_missing(modules: Iterable[str]) -> str:
    """Return why a compiled file is missing or older than its sources, empty if none is."""
    program = "import sys; from moonpool.ipc.extension import load; [load(each) for each in sys.argv[1:]]"
    ended = subprocess.run(
        [sys.executable, "-c", program, *modules],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if ended.returncode == 0 else ended.stderr.strip().rpartition("\n")[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bash .ci/gpu prepare", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=place())
    parser.add_argument("--python", default=PYTHON, help="the version of the machine's Python")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    os.chdir(ROOT)
    prepare(folder, arguments.python)


if __name__ == "__main__":
    main()
