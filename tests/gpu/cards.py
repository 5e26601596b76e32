"""The device that a test runs on: the fake one, which is built here, or the machine's own."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.waiting import wait_until

from moonpool.ipc.cuda import device as devices
from moonpool.ipc.cuda import driver
from moonpool.ipc.cuda.device import Device, device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.region import SharedRegion

SOURCE = Path(__file__).parent / "fake_driver.c"


@functools.cache
def has_card() -> bool:
    """Return true if this machine has a usable GPU. A process of its own asks the driver."""
    program = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    return asked.returncode == 0


@functools.cache
def warm() -> None:
    """Have the machine's GPU ready, so that no test is blamed for what the driver opens once; skips where there is
    none.

    The driver makes threads and opens files with the first context, event and region, and keeps them until the process
    ends.
    """
    if not has_card():
        pytest.skip("this machine has no GPU")
    with driven_by(driver.LIBRARY):
        here = device(0)
        lane = DeviceLane(here)
        region = DeviceRegion.create(1, 1, here)
        shared = SharedRegion.create(2, mmap.PAGESIZE)
        here.pin(shared)
        region.read(0, 1)
        shared.close()
        region.close()
        lane.close()


def build(folder: Path) -> Path:
    """The fake driver as `libcuda.so.1` in this folder; skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the fake driver with")
    library = folder / driver.LIBRARY
    options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1", "-pthread"]
    subprocess.run([compiler, *options, "-o", str(library), str(SOURCE)], check=True, timeout=120)
    return library


class Fake:
    """The fake driver of this process, as tests look at it."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._functions = ctypes.CDLL(str(library))
        self._functions.fakeCalls.restype = ctypes.c_long

    def calls(self, name: str) -> int:
        """Return the number of calls of a function in this process."""
        return int(self._functions.fakeCalls(name.encode()))

    def delay(self, microseconds: int, *, by_chance: bool = False) -> None:
        """Start work on streams this long after it was queued: all work, or by chance every other piece."""
        self._functions.fakeDelay(ctypes.c_long(microseconds), ctypes.c_int(by_chance))

    def live(self) -> dict[str, int]:
        """Return the number of live streams, events, allocations and address ranges of this process."""
        found = (ctypes.c_long * 4)()
        self._functions.fakeLive(found)
        return dict(zip(("streams", "events", "allocations", "ranges"), found, strict=True))

    def environment(self, **settings: object) -> dict[str, str]:
        """Return an environment in which a process finds the fake driver. `settings` have the names in its source."""
        given = {name: str(value) for name, value in settings.items()}
        # Where it stands in for a card, it is known by its name alone, and the loader finds it already.
        if self.library.is_absolute():
            given["LD_LIBRARY_PATH"] = str(self.library.parent)
        return {**os.environ, **given}

    def run(self, program: str, *arguments: str, **settings: object) -> str:
        """Run a program that finds moonpool and the fake driver, and return its output."""
        return run(program, *arguments, environment=self.environment(**settings))


def run(program: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run a program in a process of its own, with moonpool on its path, and return its output."""
    lines = f"import sys\nsys.path[:] = {sys.path!r}\n{textwrap.dedent(program)}"
    ended = subprocess.run(
        [sys.executable, "-c", lines, *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=170,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@contextmanager
def driven_by(library: str) -> Iterator[None]:
    """Have moonpool use this driver, in this process, within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "LIBRARY", library)
        patch.setattr(driver, "_loaded", None)
        patch.setattr(devices, "_devices", {})
        yield
        for each in devices._devices.values():
            settle(each)


def settle(device: Device) -> None:
    """Wait until what was let go of is unmapped, and nothing holds a descriptor any more."""

    def is_done() -> bool:
        device.tidy()
        return not device.dying

    wait_until(is_done, what="the device to be done with memory that nobody refers to")


@pytest.fixture(scope="session")
def fake_library() -> Iterator[Path]:
    """The fake driver, built once, where processes of any user find it."""
    with tempfile.TemporaryDirectory(prefix="moonpool-fake-cuda-") as folder:
        os.chmod(folder, 0o755)
        yield build(Path(folder))


@pytest.fixture
def fake(fake_library: Path) -> Iterator[Fake]:
    """moonpool in this process has the fake driver, whose work is done at once."""
    found = Fake(fake_library)
    with driven_by(str(fake_library)):
        yield found
    found.delay(0)


@pytest.fixture
def card() -> Iterator[None]:
    """moonpool in this process has the machine's own GPU."""
    warm()
    with driven_by(driver.LIBRARY):
        yield


@pytest.fixture(params=["fake", pytest.param("card", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Device:
    """A device: the fake one, and where there is one the machine's own."""
    request.getfixturevalue(request.param)
    return device(0)
