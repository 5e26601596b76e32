"""Adds a Python to a folder with musl and nothing else, so that `.ci/roots.py` can try a wheel there.

    python .ci/musl.py FOLDER

Theory of operation. Debian has musl and lets gcc compile for it, but has no Python for it. So CPython is compiled from
Debian's source package, with libffi and zlib inside its modules. Its programs run while it is built, with this
machine's musl, which may be older than that of the folder. The folder gets one program, and the modules in Python that
a program may need; it has no shell, and nothing of glibc. This Python has no ssl, bz2 and lzma, so packages come from
outside. All of it takes two and a half minutes of a processor, and fails after ten minutes.

Needs Debian or Ubuntu for x86_64 with apt, make, musl-tools and linux-libc-dev.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import sys
import tarfile
import time
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
ROOM = TREE / "build/musl"
PYTHON = "python3.13"
release = runpy.run_path(str(TREE / ".ci/release.py"))
# Source packages, each with the suite of Debian that it is from.
SOURCES = {PYTHON: "trixie", "libffi": "trixie", "zlib": "bookworm"}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MIRROR = "http://deb.debian.org/debian"
# Seconds for all of it.
LONGEST = 600
# Of libffi, with what its `configure` would find.
LIBFFI = "prep_cif.c types.c closures.c tramp.c x86/ffi64.c x86/unix64.S x86/ffiw64.c x86/win64.S"
LIBFFI_FOUND = """
#define FFI_EXEC_STATIC_TRAMP 1
#define HAVE_ALLOCA_H 1
#define HAVE_AS_X86_64_UNWIND_SECTION_TYPE 1
#define HAVE_AS_X86_PCREL 1
#define HAVE_MEMCPY 1
#define HAVE_MEMFD_CREATE 1
#define STDC_HEADERS 1
#ifdef LIBFFI_ASM
#define FFI_HIDDEN(name) .hidden name
#else
#define FFI_HIDDEN __attribute__((visibility("hidden")))
#endif
"""
LIBFFI_VALUES = {"TARGET": "X86_64", "HAVE_LONG_DOUBLE": "1", "FFI_EXEC_TRAMPOLINE_TABLE": "0"}
# Modules that need a library which is not there, and some that nobody needs and that take long.
LEFT_OUT = """
_bz2 _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr _codecs_tw _curses _curses_panel _dbm _decimal _gdbm
_hashlib _lzma _multibytecodec _sqlite3 _ssl _tkinter _uuid readline
"""
UNNEEDED = ("__pycache__", "ensurepip", "idlelib", "test", "tkinter", "turtledemo")
# gcc with musl's headers and files, and with the kernel's headers.
COMPILER = """#!/bin/sh
[ "$1" = --print-multiarch ] && exec echo x86_64-linux-musl
exec musl-gcc "$@" -idirafter {headers}
"""


def run(end: float, cwd: Path, *command: str | Path, **variables: str) -> None:
    """Run a command. If it fails or takes longer than until `end`, end the program."""
    release["run"](*command, cwd=cwd, timeout_s=max(1.0, end - time.monotonic()), **variables)


def fetch() -> Path:
    """Return a folder with the unpacked sources."""
    folder = ROOM / "source"
    if not folder.exists():
        partly = ROOM / ".source"
        shutil.rmtree(partly, ignore_errors=True)
        lines = [f"deb-src [signed-by={KEYRING}] {MIRROR} {suite} main\n" for suite in sorted({*SOURCES.values()})]
        packages = [f"{package}/{suite}" for package, suite in SOURCES.items()]
        release["debian_source"](partly, {"sources.list": "".join(lines)}, "--download-only", *packages)
        for packed_file in [each for kind in ("bz2", "gz", "xz") for each in partly.glob(f"*.orig.tar.{kind}")]:
            with tarfile.open(packed_file) as packed:
                packed.extractall(partly, filter="tar")
        partly.rename(folder)
    return folder


def compiler() -> Path:
    headers, program = ROOM / "headers", ROOM / "cc"
    headers.mkdir(parents=True, exist_ok=True)
    for name, folder in (("linux", ""), ("asm-generic", ""), ("asm", "x86_64-linux-gnu")):
        (headers / name).unlink(missing_ok=True)
        (headers / name).symlink_to(Path("/usr/include", folder, name))
    program.write_text(COMPILER.format(headers=headers))
    program.chmod(0o755)
    return program


def archive(end: float, name: str, folder: Path, files: list[str], *options: str) -> Path:
    """Compile files of a folder into an archive for the linker."""
    made = ROOM / name
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    run(end, made, compiler(), "-c", "-O1", "-fPIC", *options, *(folder / each for each in files))
    run(end, made, "ar", "rcs", f"{name}.a", *(each.name for each in made.glob("*.o")))
    return made / f"{name}.a"


def libffi(end: float, source: Path) -> tuple[Path, Path]:
    """Return the headers of libffi and its archive."""
    headers = ROOM / "include"
    headers.mkdir(parents=True, exist_ok=True)
    (headers / "fficonfig.h").write_text(LIBFFI_FOUND)
    text = (source / "include/ffi.h.in").read_text()
    for name, value in {**LIBFFI_VALUES, "VERSION": source.name.partition("-")[2]}.items():
        text = text.replace(f"@{name}@", value)
    (headers / "ffi.h").write_text(text)
    shutil.copy(source / "src/x86/ffitarget.h", headers)
    options = [f"-I{headers}", f"-I{source}/include", "-D_GNU_SOURCE"]
    return headers, archive(end, "libffi", source / "src", LIBFFI.split(), *options)


def python(end: float) -> tuple[Path, Path]:
    """Build it unless that was done. Returns the folders of its source and of what was made."""
    sources, made = fetch(), ROOM / "python"
    (source,) = sources.glob("Python-*")
    if (made / "done").exists():
        return source, made
    ((ffi,), (zlib,)) = sources.glob("libffi-*"), sources.glob("zlib-*")
    headers, libffi_archive = libffi(end, ffi)
    libz = archive(end, "libz", zlib, [each.name for each in zlib.glob("*.c")], "-DHAVE_UNISTD_H")
    variables = {
        "CC": str(compiler()),
        "OPT": "-O1 -DNDEBUG -fwrapv",
        "LIBFFI_CFLAGS": f"-I{headers}",
        "LIBFFI_LIBS": str(libffi_archive),
        "ZLIB_CFLAGS": f"-I{zlib}",
        "ZLIB_LIBS": str(libz),
    }
    shutil.rmtree(made, ignore_errors=True)
    (made / "Modules").mkdir(parents=True)
    (made / "Modules/Setup.local").write_text(f"*disabled*\n{LEFT_OUT}")
    options = ["--prefix=/usr", "--without-ensurepip", "--with-pkg-config=no", "--disable-test-modules"]
    run(end, made, source / "configure", *options, **variables)
    run(end, made, "make", "--silent", f"--jobs={len(os.sched_getaffinity(0))}", "build_all")
    (made / "done").touch()
    return source, made


def add_python(root: Path) -> None:
    """Add it to a folder, with its modules."""
    if platform.machine() != "x86_64" or not shutil.which("musl-gcc"):
        sys.exit("a Python for musl is built on x86_64, with musl-tools, a package of Debian")
    source, made = python(time.monotonic() + LONGEST)
    # Its Makefile would compile all modules in Python, three times.
    modules = root / "usr/lib" / PYTHON
    shutil.copytree(source / "Lib", modules, ignore=shutil.ignore_patterns(*UNNEEDED))
    (modules / "lib-dynload").mkdir()
    compiled = made / (made / "pybuilddir.txt").read_text()
    for module in [*compiled.glob("*.so"), *compiled.glob("_sysconfigdata_*.py")]:
        shutil.copy(module, modules / ("lib-dynload" if module.suffix == ".so" else ""))
    shutil.copy(made / "python", root / "usr/bin/python3")


if __name__ == "__main__":
    add_python(Path(sys.argv[1]))
