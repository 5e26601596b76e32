"""Facts of the machine: what kernel, driver and packages it has, and what of moonpool works there.

Each question is asked by a process of its own, all at once, since some wait for the driver and others import much.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.card import prepared
from tests.card.results import limit_s, record

_PACKAGES = (
    "numpy", "msgpack", "pytest", "pytest-xdist", "pytest-timeout", "torch", "cupy-cuda12x",
    "cupy-cuda13x", "cuda-bindings", "cuda-core", "nvidia-ml-py", "onnxruntime", "grpcio", "protobuf",
    "uvloop", "prometheus_client", *prepared.PACKAGES,
)  # fmt: skip
_MODULES = {"python-rapidjson": "rapidjson"}
_QUERY = "name,driver_version,memory.used,memory.total,compute_mode,persistence_mode,mig.mode.current,pci.bus_id,uuid"
_NODES = ("/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/dri/*")
_DRIVER_FILES = (
    "/proc/driver/nvidia/version", "/proc/driver/nvidia/params",
    "/proc/driver/nvidia/gpus/*/information", "/proc/driver/nvidia-caps/*", "/proc/driver/nvidia-uvm/*",
)  # fmt: skip
_LANDLOCK_CREATE_RULESET, _RULESET_VERSION = 444, 1


def said(command: list[str], timeout_s: float = 10) -> tuple[int | None, str]:
    """Return a program's exit status and output. The status is None if there is no such program, or it took too
    long.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        return None, f"{command[0]} is not here: {error.strerror}"
    try:
        words, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # It may wait in the driver, so nobody waits for its end.
        process.kill()
        return None, f"{command[0]} did not answer within {timeout_s:g} s"
    return process.returncode, words.strip()


def used_memory_mib(timeout_s: float = 5) -> tuple[float | None, str]:
    """Return the memory in use on all cards as nvidia-smi tells it, with its words about cards and processes."""
    status, cards = said(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"], timeout_s)
    if status != 0:
        return None, cards
    used = [float(found) for found in re.findall(r"^[^,]+,[^,]+, (\d+) MiB", cards, re.MULTILINE)]
    asked = ["nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader"]
    processes = said(asked, timeout_s)[1]
    return sum(used), f"{cards}\n{processes or 'no process uses a card'}"


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError as error:
        return str(error)


def _machine() -> None:
    record("kernel", True, platform.release(), text=" ".join(os.uname()))
    record("python", sys.version_info >= (3, 11), platform.python_version(), expected="3.11 or newer",
           text=sys.executable)  # fmt: skip
    record("C library", True, " ".join(platform.libc_ver()))
    record("processors", True, len(os.sched_getaffinity(0)))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    record("memory", True, round(pages / (1 << 30), 1), "GiB")
    record("/dev/shm", True, round(shutil.disk_usage("/dev/shm").total / (1 << 30), 1), "GiB")
    record("user", True, os.getuid(), text=_text_of("/proc/self/uid_map"))
    for name in ("NOFILE", "NPROC", "MEMLOCK", "CORE"):
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        record(f"limit {name}", True, soft, text=f"at most {hard}; -1 is none")
    for compiler in ("cc", "c++", "nvcc"):
        record(compiler, None if shutil.which(compiler) is None else True, shutil.which(compiler))


def _kernel() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _RULESET_VERSION)
    why = "" if version > 0 else os.strerror(ctypes.get_errno())
    record("Landlock", version > 0 or None, version, expected="1 or more", text=why)
    seccomp = _text_of("/proc/sys/kernel/seccomp/actions_avail")
    record("seccomp", "errno" in seccomp or None, text=seccomp)
    namespaces = sorted(os.listdir("/proc/self/ns"))
    record("namespaces", True, text=" ".join(namespaces))
    for path in ("user/max_user_namespaces", "kernel/unprivileged_userns_clone", "vm/mmap_min_addr",
                 "kernel/yama/ptrace_scope", "vm/overcommit_memory"):  # fmt: skip
        record(f"/proc/sys/{path}", True, text=_text_of(f"/proc/sys/{path}"))
    record("cgroups", True, text=_text_of("/proc/self/cgroup"))
    capabilities = re.search(r"CapEff:\s*(\w+)", _text_of("/proc/self/status"))
    record("capabilities", True, capabilities and capabilities[1])


def _nvidia() -> None:
    used, words = used_memory_mib()
    record("nvidia-smi before", None if used is None else True, used, "MiB", text=words)
    for pattern in _DRIVER_FILES:
        for path in sorted(glob.glob(pattern)) or [pattern]:
            is_here = os.path.exists(path)
            record(path, is_here or None, text=_text_of(path) if os.path.isfile(path) else "")
    for pattern in _NODES:
        for path in sorted(glob.glob(pattern)):
            found = os.stat(path)
            if stat.S_ISCHR(found.st_mode):
                numbers = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
                owner = f"{found.st_uid}:{found.st_gid}"
                record(path, True, oct(found.st_mode & 0o7777), text=f"device {numbers}, owner {owner}")
    for name, program in (("MPS", "nvidia-cuda-mps-control"), ("fabric manager", "nv-fabricmanager")):
        record(name, True, "installed" if shutil.which(program) else "not installed")


def _driver() -> None:
    """Load the driver's library, and tell by which rule of the loader it was found."""
    name = "libcuda.so.1"
    cached = [line for line in said(["/sbin/ldconfig", "-p"])[1].splitlines() if name in line]
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        record(name, False, text=f"{error}; the loader's cache has: {cached or 'nothing'}")
        return
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split(maxsplit=5)[5] for line in maps if "libcuda." in line})
    where = paths[0] if paths else "?"
    named = [each for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
    # The cache names a link, and the maps the file.
    if any(os.path.realpath(f"{each}/{name}") == where for each in named):
        rule = "LD_LIBRARY_PATH"
    elif any(os.path.realpath(line.rpartition(" => ")[2]) == where for line in cached):
        rule = "the loader's cache"
    else:
        rule = "a usual folder of the loader's"
    record(name, True, rule, text=f"{where}; the cache has: {cached or 'nothing'}")
    status = library.cuInit(0)
    record("cuInit", status == 0, status, expected="0")
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    record("CUDA of the driver", version.value >= 12000, version.value, expected="12000 or more")
    library.cuDeviceGetCount(ctypes.byref(count))
    record("cards", count.value > 0, count.value, expected="1 or more")


def _packages() -> None:
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            record(f"package {name}", None, text="not here")
            continue
        if name not in prepared.PACKAGES:
            record(f"package {name}", True, version)
            continue
        try:
            module = importlib.import_module(_MODULES.get(name, name))
        except ImportError as error:
            record(f"package {name}", False, version, text=f"it does not load: {error}")
        else:
            record(f"package {name}", True, version, text=str(module.__file__))


def _libraries() -> None:
    """Import what takes long. A case for a card has the files in memory afterwards, and its own limit to itself."""
    for name in ("torch", "cupy"):
        if importlib.util.find_spec(name) is None:
            continue
        began = time.monotonic()
        importlib.import_module(name)
        record(f"import {name}", True, round(time.monotonic() - began, 1), "s")


def _sandbox() -> None:
    status, words = said([sys.executable, "-m", "moonpool", "sandbox"], limit_s() - 2)
    print(words)
    record("moonpool sandbox", status == 0, status, expected="0", text=words)


def _moonpool() -> None:
    from moonpool.ipc.cuda.device import device
    from moonpool.runtime.model.gpus import usable_gpus

    gpus, why = usable_gpus()
    record("GPUs for models", bool(gpus), len(gpus), expected="1 or more", text=why)
    for number in gpus:
        here = device(number)
        free, total = here.memory_info()
        record(
            f"GPU {number}", True, here.name, text=f"{free >> 20} of {total >> 20} MiB are free; memory is shared "
            + ("by descriptor" if here.has_descriptors else "by handle"),
        )  # fmt: skip


_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
"""
_TENSOR = {"data_type": "TYPE_INT32", "dims": [1]}
_CONFIG = {"input": [{"name": "X", **_TENSOR}], "output": [{"name": "Y", **_TENSOR}]}


def _compiled() -> None:
    """Look at the files that a runtime and its stub have mapped, and load each compiled module."""
    import moonpool
    from moonpool.ipc.extension import load

    with tempfile.TemporaryDirectory() as folder, moonpool.Runtime() as runtime:
        model = Path(folder, "model.py")
        model.write_text(_MODEL)
        runtime.load("m", model, config=_CONFIG)
        mapped = {"runtime": _mapped(os.getpid()), "stub": _mapped(runtime.instances("m")[0]["pid"])}
    for process, files in mapped.items():
        record(f"compiled forms in use by a {process}", bool(files) or None, " ".join(files))
    names = ("ipc._copy", "runtime.schedule._lane", "stub.peers._stub_port", "runtime.server.grpc._http2")
    for name in names:
        is_here = bool(glob.glob(f"{prepared.ROOT}/{name.replace('.', '/')}.*so"))
        try:
            found = load(f"moonpool.{name}")
        except ImportError as error:
            record(f"compiled {name}", False if is_here else None, text=str(error))
        else:
            record(f"compiled {name}", True, text=found.__file__)


def _mapped(pid: int) -> list[str]:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sorted(set(re.findall(r"(\w+)\.abi3\.so$", maps, re.MULTILINE)))


_QUESTIONS: dict[str, Callable[[], None]] = {
    "machine": _machine,
    "kernel": _kernel,
    "nvidia": _nvidia,
    "driver": _driver,
    "packages": _packages,
    "libraries": _libraries,
    "sandbox": _sandbox,
    "moonpool": _moonpool,
    "compiled": _compiled,
}


# These use the card, and come when it is known what is in use on it without them.
_USERS = ("moonpool", "compiled")
_FIRST_LOOK_S = 5.0


def _ask(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.card.facts", name], start_new_session=True)


def main() -> None:
    ends = time.monotonic() + limit_s() - 1
    asked = {name: _ask(name) for name in _QUESTIONS if name not in _USERS}
    with contextlib.suppress(subprocess.TimeoutExpired):
        asked["nvidia"].wait(_FIRST_LOOK_S)
    asked |= {name: _ask(name) for name in _USERS}
    for name, process in asked.items():
        try:
            status = process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            record(f"question {name}", False, text="it got no answer in time")
            continue
        if status:
            record(f"question {name}", False, status, text="the log has what went wrong")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _QUESTIONS[sys.argv[1]]()
    else:
        main()
