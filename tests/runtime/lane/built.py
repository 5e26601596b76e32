"""Extensions, compiled with sanitizers where a test wants them so."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.runtime.triton.library import sanitizer_libraries

import moonpool
from moonpool.ipc import port
from moonpool.ipc.channel import Channel
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.extension import checksum
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.port import RuntimePort

PACKAGE = Path(moonpool.__path__[0])
# To optimize takes the compiler more than twice as long, and hides from the sanitizers what it leaves out.
FLAGS = ["-std=c++17", "-O0", "-g1", "-fPIC", "-shared", "-fno-omit-frame-pointer"]
# As in setup.py: `unwinding.h` needs it.
FLAGS += ["-Wl,--wrap=__gxx_personality_v0", "-DPy_LIMITED_API=0x030B0000"]


def skip_without_compiled() -> None:
    """Skip where moonpool was installed without a compiler, or is to go without what was compiled."""
    if port.compiled is None:
        pytest.skip("nothing is compiled here: python setup.py build_ext --inplace")


def counts() -> dict[str, int]:
    """Return how often each method of the compiled port did its work."""
    counted: dict[str, int] = port.compiled.counts()
    return counted


def port_on(channel: Channel) -> RuntimePort:
    """Return the port of a channel that nothing else belongs to."""
    conversation = Conversation(channel, Side.RUNTIME, Overflow(), Kind.LOADED)
    return RuntimePort(conversation, None, None, deque(), deque(), {})


PORT = ("ipc/port/_port", ("answer", "channel", "codec", "msgpack", "place"))
"""The compiled port, and what it needs of the core."""


def sanitized(folder: Path, sanitizers: str, module: str = PORT[0], core: Sequence[str] = PORT[1]) -> tuple[Path, str]:
    """Compile an extension with these sanitizers. Returns the module, and the LD_PRELOAD for a program that imports
    it.
    """
    libraries = sanitizer_libraries([f"lib{name}.so" for name in LIBRARIES[sanitizers]])
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        pytest.skip("the headers of Python are not installed")
    place, shared = PACKAGE / module, PACKAGE / "ipc/native"
    name = ".".join(("moonpool", *Path(module).parts))
    sources = [*place.parent.glob(f"{place.name}*.cpp"), *(shared / f"{each}.cpp" for each in core)]
    if place.with_suffix(".pyx").is_file():
        sources.append(_in_cpp(place.with_suffix(".pyx"), name, folder))
    if not (shared / "codec.cpp").is_file():
        pytest.skip("the sources of the extensions are not installed")
    target = folder / f"{place.name}.abi3.so"
    command = [os.environ.get("CXX", "g++"), *FLAGS, f"-fsanitize={sanitizers}"]
    command += [f'-DMOONPOOL_SOURCES="{checksum(name)}"', f"-I{PACKAGE / 'ipc/extension'}"]
    command += [f"-I{include}", f"-I{shared}", f"-I{place.parent}", "-o", str(target), *map(str, sources)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.fail(f"{place.name} cannot be compiled:\n{made.stderr}", pytrace=False)
    return target, libraries


def _in_cpp(source: Path, name: str, folder: Path) -> Path:
    """Make C++ of what is written in Cython."""
    target = folder / f"{name}.cpp"
    tool = [sys.executable, "-m", "cython", "-3", "--cplus", "--module-name", name]
    subprocess.run([*tool, str(source), "-o", str(target)], check=True)
    return target


CALL_PORT = ("ipc/port/_calls", ("answer", "codec", "msgpack"))
"""That of calls."""
STUB_PORT = ("stub/peers/_stub_port", PORT[1])
"""That of a stub."""
STUB_CALLS = ("stub/peers/_stub_calls", CALL_PORT[1])
"""That of its calls."""
LIBRARIES = {"address,undefined": ("asan", "ubsan"), "thread": ("tsan",)}
