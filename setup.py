"""Compiles the extensions and the library for tritonserver into the wheel, and keeps the tree's links in an sdist.

Everything else is in pyproject.toml.

Extensions are of three kinds. Most are modules in Python, compiled as they are by Cython: the file with the types,
`a.pxd`, lies beside `a.py`, and `_a` is the compiled module. The ports are written in Cython and have a form in
Python, too. What is left is for compiled code alone, or C++ that Python can do without. So moonpool works without each
of them, and one that cannot be compiled is left out. They use Python's limited API and nothing of numpy's headers, so
one wheel serves every CPython from 3.11 on. An editable installation compiles them into the tree.

The library for tritonserver is no Python module. A wheel without it works for everything but Triton. A wheel has a copy
of nghttp2 where it was built with one.

Where Python's headers are and no compiler is, the build asks for zig, a compiler that is installed from a wheel.
Without headers, moonpool is built without extensions. So it is for a Python without its lock, for which nothing of the
limited API can be compiled.

Wheels for other machines are cross-compiled by `.ci/release.py`, which sets `CC` and `CXX`, `_PYTHON_HOST_PLATFORM`,
and the copy of nghttp2.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

SOURCE = Path("src")
CORE = SOURCE / "moonpool/ipc/native"
SHARED = SOURCE / "moonpool/ipc/extension"
NATIVE = SOURCE / "moonpool/runtime/triton/native"
PACKAGES = [SOURCE / "moonpool" / each for each in ("ipc", "runtime", "stub")]
# How Python knows an extension that is older than its sources.
FOUND = runpy.run_path(str(SOURCE / "moonpool/ipc/extension/__init__.py"))
LIBRARY = "moonpool.runtime.triton.libtriton_moonpool"
HTTP2 = "moonpool.runtime.server.grpc._http2"
NGHTTP2 = "libnghttp2.so.14"
# `0`: leave out the library for tritonserver.
SWITCH = "MOONPOOL_BUILD_TRITON"
# `0`: leave out the extensions.
EXTENSIONS_SWITCH = "MOONPOOL_BUILD_EXTENSIONS"
# A file: the copy of nghttp2 for the wheel, in place of this machine's.
NGHTTP2_SWITCH = "MOONPOOL_BUILD_NGHTTP2"
# A C++ compiler that is installed from a wheel, for machines that have none. It takes no options for one processor
# alone.
ZIG = "ziglang~=0.17.1"
ZIG_MACHINES = ("x86_64", "aarch64")
# Of Cython: everything is checked, as in Python, and the annotations of modules in Python are for readers alone.
DIRECTIVES = [
    "annotation_typing=False",
    "binding=False",
    "boundscheck=True",
    "initializedcheck=True",
    "nonecheck=True",
    "overflowcheck=True",
    "wraparound=True",
]
# Cython would make a tuple for each call before 3.12, as the limited API has no better one:
# `ipc/extension/vectorcall.h` has it.
VECTORCALL = (
    ("#define CYTHON_VECTORCALL (__PYX_LIMITED_VERSION_HEX >= 0x030C0000)", "#define CYTHON_VECTORCALL 1"),
    # In coroutines.
    (
        "#if CYTHON_VECTORCALL && (__PYX_LIMITED_VERSION_HEX >= 0x030C0000 || !CYTHON_COMPILING_IN_LIMITED_API)",
        "#if CYTHON_VECTORCALL",
    ),
)
LIMITED_API = "0x030B0000"  # Python 3.11, as the tag of the wheel says
TAG = ("cp311", "abi3")
FLAGS = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-fvisibility=hidden",
    "-fno-plt",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    # A thread of a model or of a caller may have a small stack.
    "-Wframe-larger-than=8192",
]
# A model's interpreter may have another libstdc++, or none that its sandbox lets it read. The unwinder is the process'
# own, which the C library needs to end a thread; `unwinding.h` tells what it finds here, and does without the code that
# makes types readable, which would be up to nine tenths of an extension.
LINK = [
    "-static-libstdc++",
    "-Wl,--wrap=__gxx_personality_v0",
    "-Wl,--wrap=__cxa_demangle",
    "-ldl",
    "-Wl,-z,now",
    "-Wl,--gc-sections",
    f"-Wl,--version-script={SHARED / 'exports.map'}",
]


def is_for_cython(source: str | Path) -> bool:
    return str(source).endswith((".py", ".pyx"))


def extension(name: str, *core: str) -> Extension:
    """Describe an extension. Its sources lie where the module will; `core` names files of the core that it needs."""
    place = SOURCE / name.replace(".", "/")
    sources = [
        *place.parent.glob(f"{place.name}*.cpp"),
        *place.parent.glob(f"{place.name}.pyx"),
        *FOUND["compiled_from"](name),
        *(CORE / f"{each}.cpp" for each in core),
    ]
    return Extension(
        name,
        sorted(map(str, sources)),
        depends=[*map(str, FOUND["sources"](name)), "setup.py"],
        include_dirs=[str(CORE), str(SHARED), str(place.parent)],
        define_macros=[("Py_LIMITED_API", LIMITED_API), ("MOONPOOL_SOURCES", f'"{FOUND["checksum"](name)}"')],
        extra_compile_args=[
            *FLAGS,
            *(["-include", "vectorcall.h"] if any(map(is_for_cython, sources)) else []),
            *(["-include", "unwinding.h"] if FOUND["compiled_from"](name) else []),
        ],
        extra_link_args=LINK,
        language="c++",
        py_limited_api=True,
        optional=True,
    )


EXTENSIONS = [
    extension("moonpool.ipc._copy"),
    extension("moonpool.ipc.port._port", "answer", "channel", "codec", "msgpack", "place"),
    extension("moonpool.ipc.port._calls", "answer", "codec", "msgpack"),
    extension("moonpool.ipc.slots._slots", "channel", "look", "slot"),
    extension(HTTP2),
    extension("moonpool.runtime.server.http._scan"),
    extension("moonpool.stub.peers._stub_port", "answer", "channel", "codec", "msgpack"),
    extension("moonpool.stub.peers._stub_calls", "answer", "codec", "msgpack"),
    # Modules in Python, as they are: the `.pxd` file beside each has the types of its attributes.
    extension("moonpool.runtime.ensemble._chain"),
    extension("moonpool.runtime.ensemble._members"),
    extension("moonpool.runtime.ensemble._scheduler"),
    extension("moonpool.runtime.model._backend"),
    extension("moonpool.runtime.model._details"),
    extension("moonpool.runtime.model._protobuf"),
    extension("moonpool.runtime.model._signature"),
    extension("moonpool.runtime.observe._distributions"),
    extension("moonpool.runtime.observe._statistics"),
    extension("moonpool.runtime.process._reactor"),
    extension("moonpool.runtime.schedule._batcher"),
    extension("moonpool.runtime.schedule._request_queue"),
    extension("moonpool.runtime.schedule._lane"),
    extension("moonpool.runtime.schedule._event_loop"),
    extension("moonpool.runtime.server.grpc._call"),
    extension("moonpool.runtime.server.grpc._connection"),
    extension("moonpool.runtime.server.grpc._inference"),
    extension("moonpool.runtime.server.grpc._infer_request"),
    extension("moonpool.runtime.server.grpc._infer_response"),
    extension("moonpool.runtime.server.grpc._wire"),
    extension("moonpool.runtime.server.http._connection"),
    extension("moonpool.runtime.server.http._handler"),
    extension("moonpool.runtime.server.http._head"),
    extension("moonpool.runtime.server.http._infer_request"),
    extension("moonpool.runtime.server.http._infer_response"),
    extension("moonpool.runtime.server.http._inference"),
    extension("moonpool.runtime.server._meter"),
    extension("moonpool.runtime.server.inference._call"),
    extension("moonpool.runtime.server.inference._request"),
    extension("moonpool.runtime.stubs._borrowed_blocks"),
    extension("moonpool.runtime.stubs._control"),
    extension("moonpool.runtime.stubs.calls._requests"),
    extension("moonpool.runtime.stubs.calls._dispatcher"),
]


def compiler() -> str | None:
    """Return the command of the C++ compiler: that of CXX or g++, else zig's; None if none of them is installed."""
    command = os.environ.get("CXX", "g++")
    if shutil.which(shlex.split(command)[0]):
        return command
    return zig("c++") if importlib.util.find_spec("ziglang") else None


def zig(language: str) -> str:
    """Return the command of zig's compiler, for all machines of this one's kind."""
    library = "gnu.2.28" if platform.libc_ver()[0] == "glibc" else "musl"
    target = f"{platform.machine()}-linux-{library}"
    # Debian's headers of Python include one from there. zig's own headers of the C library go first.
    folder = str(Path(sysconfig.get_path("include")).parent)
    return shlex.join([sys.executable, "-m", "ziglang", language, "-target", target, "-idirafter", folder])


def has_headers() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").is_file()


def build_requirements() -> list[str]:
    """Return what the build needs beside what pyproject.toml says: a compiler, if nothing else is missing."""
    wanted = os.environ.get(EXTENSIONS_SWITCH) != "0" and has_headers() and has_lock()
    return [ZIG] if wanted and compiler() is None and platform.machine() in ZIG_MACHINES else []


def has_lock() -> bool:
    return not sysconfig.get_config_var("Py_GIL_DISABLED")


def extensions() -> list[Extension]:
    """Return what can be compiled here, and print what cannot."""
    library = [Extension(LIBRARY, sorted(map(str, [*NATIVE.glob("*.cpp"), *CORE.glob("*.cpp")])))]
    parts = [
        (SWITCH, "the library for tritonserver", library, {"make": shutil.which("make")}),
        (EXTENSIONS_SWITCH, "extensions", EXTENSIONS, {"Python.h": has_headers(), "lock in this Python": has_lock()}),
    ]
    found = []
    for switch, name, modules, needs in parts:
        missing = [need for need, there in {"C++ compiler": compiler(), **needs}.items() if not there]
        if os.environ.get(switch) == "0":
            continue
        if missing:
            print(f"moonpool is built without {name}: there is no {' and no '.join(missing)}")
        else:
            found += modules
    if found and "ziglang" in (command := compiler() or ""):
        # The linker, too, as zig does not know all options of the one that made this Python. The debugging information
        # of zig's C++ library would be most of an extension.
        shared = f"{command} -shared -Wl,--strip-debug"
        os.environ.update(CC=zig("cc"), CXX=command, LDSHARED=shared, LDCXXSHARED=shared)
    return found


def bundle(folder: Path) -> None:
    """Put a copy of nghttp2 and its license beside the extension that opens it, for machines that have none."""
    found = os.environ.get(NGHTTP2_SWITCH)
    if not found:
        try:
            ctypes.CDLL(NGHTTP2)
        except OSError as error:
            print(f"moonpool is built without a copy of nghttp2: {error}")
            return
        maps = Path("/proc/self/maps").read_text().splitlines()
        (found,) = {line.split(maxsplit=5)[5] for line in maps if f"/{NGHTTP2}" in line}
    shutil.copyfile(found, folder / NGHTTP2)
    license_of = SOURCE / HTTP2.replace(".", "/")
    shutil.copy(license_of.with_name("libnghttp2.LICENSE"), folder)


class Build(build_ext):
    """Compiles extensions as setuptools does, and the library with its Makefile."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        if self.inplace:
            # The tests compile the library when they need it.
            self.extensions = [each for each in self.extensions if each.name != LIBRARY]

    def get_ext_filename(self, fullname: str) -> str:
        # The library is no Python module, so its file name has no tag of an interpreter.
        if fullname.rpartition(".")[2] == LIBRARY.rpartition(".")[2]:
            return f"{fullname.replace('.', '/')}.so"
        return super().get_ext_filename(fullname)

    def in_cpp(self, extension: Extension) -> list[str]:
        """Return the sources of an extension, with what is for Cython as C++ in the folder for what is temporary."""
        return [
            self.cythonized(extension.name, Path(source)) if is_for_cython(source) else source
            for source in extension.sources
        ]

    def build_extensions(self) -> None:
        # First, so that what changes from here on is older than its sources, and not mixed with others.
        self.checksums = {each.name: FOUND["checksum"](each.name) for each in self.extensions}
        # Before extensions are compiled side by side: each reads the types of others.
        self.lay_out_types()
        super().build_extensions()

    @property
    def types(self) -> Path:
        # What Cython makes is the same for all machines.
        return Path(self.get_finalized_command("build").build_base, "cython")

    def lay_out_types(self) -> None:
        """Copy the types of all compiled modules to where Cython looks for them."""
        for found in [each for package in PACKAGES for each in package.rglob("*.pxd")]:
            target = self.types.joinpath(*found.relative_to(SOURCE).parts)
            if found.with_suffix(".py").is_file():
                target = target.with_name(f"_{target.name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            for folder in [*target.relative_to(self.types).parents][:-1]:
                self.types.joinpath(folder, "__init__.py").touch()
            shutil.copyfile(found, target)

    def cythonized(self, name: str, source: Path) -> str:
        """Make C++ of a source in Cython or in Python. Returns its path.

        A module in Python is compiled under another name, with its checksum in it: its own name stays that of the
        Python file.
        """
        root = self.types
        copy = root.joinpath(*name.split(".")).with_suffix(source.suffix)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text()
        if source.suffix == ".py":
            text += f'\nSOURCES = "{self.checksums[name]}"\n'
        copy.write_text(text)
        tool = [sys.executable, "-m", "cython", "-3", "--cplus", "-I", str(root), "--module-name", name]
        for directive in DIRECTIVES:
            tool += ["-X", directive]
        made = copy.with_suffix(".cpp")
        # Once for each state of the sources, whichever interpreter builds: pip has another one each time.
        stamp, state = copy.with_suffix(".state"), f"{self.checksums[name]} {tool[1:]} {VECTORCALL}"
        if made.is_file() and stamp.is_file() and stamp.read_text() == state:
            return str(made)
        if subprocess.run([*tool, str(copy), "-o", str(made)], check=False).returncode:
            raise CompileError(f"{source} was not compiled; it needs Cython")
        text = made.read_text()
        for wrong, right in VECTORCALL:
            text = text.replace(wrong, right)
        made.write_text(text)
        stamp.write_text(state)
        return str(made)

    def build_extension(self, extension: Extension) -> None:
        if extension.name != LIBRARY:
            extension.sources = self.in_cpp(extension)
            super().build_extension(extension)
            if extension.name == HTTP2:
                bundle(Path(self.get_ext_fullpath(extension.name)).parent)
            return
        made = Path(self.build_temp).absolute()
        command = ["make", "-C", str(NATIVE), f"OUT={made}", f"-j{os.cpu_count() or 1}"]
        if subprocess.run(command, check=False).returncode:
            raise CompileError(f"the library for tritonserver was not compiled; {SWITCH}=0 builds moonpool without it")
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(made / target.name, target)

    def copy_extensions_to_source(self) -> None:
        """Put the compiled extensions into the tree, each by renaming a new file: a running process may have mapped the
        old one.
        """
        for each in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(each.name)))
            if built.is_file():
                target = SOURCE / built.relative_to(self.build_lib)
                made = target.with_name(f".{target.name}-{os.getpid()}")
                shutil.copy(built, made)
                os.replace(made, target)


class Sdist(sdist):
    """Packs the repository's tree, links included. setuptools alone would pack the files behind a link a second
    time.
    """

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        links = sorted({link for file in files if (link := link_of(file))})
        super().make_release_tree(base_dir, [file for file in files if not link_of(file)])
        for link in links:
            copy = Path(base_dir, link)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(os.readlink(link))


def link_of(file: str) -> str | None:
    """Return the link that a path leads through or ends at; None if there is none."""
    path = Path(file)
    return next((str(part) for part in (*reversed(path.parents), path) if part.is_symlink()), None)


class Wheel(bdist_wheel):
    """Names the Pythons that may have what was compiled: any, unless an extension is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        built = Path(self.get_finalized_command("build_ext").build_lib)
        interpreter, abi = TAG if any(built.rglob("*.abi3.so")) else ("py3", "none")
        return interpreter, abi, platform


# tests/card takes what is defined here without building anything.
if __name__ == "__main__":
    setup(
        ext_modules=extensions(),
        setup_requires=build_requirements(),
        cmdclass={"build_ext": Build, "bdist_wheel": Wheel, "sdist": Sdist},
    )
