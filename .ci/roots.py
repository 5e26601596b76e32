"""Installs the wheels of a release on systems with nothing but Python, and lets the demo run there.

    python .ci/roots.py                       on every system
    python .ci/roots.py debian-12 here-3.12   on some

Theory of operation. A system is a folder that mmdebstrap fills with Debian's packages, which are unpacked and not
configured: there is no compiler, no header, and nothing of this machine. It is entered with namespaces of its own for
mounts and processes, and with 64 MiB of shared memory, as containers have. Programs of another processor run under
qemu. It is so slow that this machine's pip installs there, and that one model answers in place of the demo, whose
deadlines are those of a processor. `here-…` are the other versions of Python that this machine has, each in an
environment of its own. Debian has no Python for musl, so `.ci/musl.py` builds one. It installs nothing by itself, and
runs more than the demo, as the tests do not run there.

Needs root, mmdebstrap, and the wheels in `dist`; for arm64 also qemu-user-static, arch-test and binfmt_misc; for musl
what `.ci/musl.py` needs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
DIST = TREE / "dist"
ROOM = TREE / "build/roots"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = ["base-files", "coreutils", "dash", "libc-bin", "libstdc++6", "python3", "python3-venv"]
# Megabytes of moonpool and what it cannot do without.
LARGEST = 75
# Seconds for the installation and the demo.
LONGEST = 60


@dataclass(frozen=True)
class System:
    """A version of Debian for a kind of processor, or its musl alone."""

    suite: str
    architecture: str
    wheel: str
    """The end of the wheel's name."""
    longest: float = LONGEST
    largest: float = LARGEST

    @property
    def is_musl(self) -> bool:
        return self.wheel.startswith("musllinux")

    @property
    def platforms(self) -> list[str]:
        """The tags of wheels that it takes."""
        tags = ("musllinux_1_2",) if self.is_musl else ("manylinux_2_28", "manylinux_2_27", "manylinux2014")
        return [f"{each}_{self.wheel.removeprefix(tags[0] + '_')}" for each in tags]


SYSTEMS = {
    "debian-12": System("bookworm", "amd64", "manylinux_2_28_x86_64"),
    "debian-13": System("trixie", "amd64", "manylinux_2_28_x86_64"),
    "debian-sid": System("sid", "amd64", "manylinux_2_28_x86_64"),
    # An emulated processor is ten times as slow.
    "debian-13-arm64": System("trixie", "arm64", "manylinux_2_28_aarch64", 10 * LONGEST),
    # Its programs are three, and numpy brings libraries of Fortran there.
    "musl": System("trixie", "amd64", "musllinux_1_2_x86_64", 2 * LONGEST, 80),
}

# Enters a folder: $1, then a command.
ENTER = r"""
set -e
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
mkdir -p "$root"/{proc,dev,tmp,run,etc/ssl/certs}
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev"
mkdir "$root/dev/shm"
mount -t tmpfs -o size=64m tmpfs "$root/dev/shm"
for device in null zero full random urandom tty; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs tmpfs "$root/tmp"
cp -L /etc/resolv.conf /etc/hosts "$root/etc"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs"
cd "$root"
exec chroot . "$@"
"""

# What an emulated processor does in place of the demo.
ANSWER = """
import moonpool
from moonpool.ipc.extension import load
from moonpool.runtime.cli.demo import examples
load("moonpool.ipc.port._port")
with moonpool.Runtime(str(examples() / "models"), models=[]) as runtime:
    runtime.load("primes")
    count = runtime.infer("primes", {"LIMIT": [[30]]}, timeout_s=300)["COUNT"]
    if count.tolist() != [[10]]:
        raise SystemExit(f"primes answered {count}")
"""

# Asks a confined model, and runs source that must not read everything.
STRICT = """
import moonpool
from moonpool.runtime.cli.demo import examples
with moonpool.Runtime(str(examples() / "models"), models=[], sandbox="strict") as runtime:
    runtime.load("primes")
    count = runtime.infer("primes", {"LIMIT": [[30]]}, timeout_s=60)["COUNT"]
    if count.tolist() != [[10]]:
        raise SystemExit(f"primes answered {count}")
if moonpool.run("sum(x)", {"x": [1, 2, 6]}, timeout_s=60, memory="512M").value != 9:
    raise SystemExit("a confined process cannot count")
error = moonpool.run("open('/proc/1/environ').read()", timeout_s=60).error
if error is None or error.type != "PermissionError":
    raise SystemExit(f"a confined process reads what is not its own: {error}")
"""

DEMO = ["-m", "moonpool", "demo"]

# Prints what an environment has installed: versions, and bytes without what Python compiled.
SIZES = """
import json, sys
from importlib import metadata
sizes = {}
for each in metadata.distributions():
    files = [file.locate() for file in each.files or () if not str(file).endswith(".pyc")]
    sizes[each.name] = sum(file.stat().st_size for file in files if file.is_file())
print(json.dumps({"python": sys.version.split()[0], "sizes": sizes}))
"""


def is_emulated(system: System) -> bool:
    return system.architecture != {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def register_emulator() -> None:
    """Let the kernel start programs for arm64 with qemu."""
    registry = Path("/proc/sys/fs/binfmt_misc")
    if not (registry / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", registry], check=True)
    if not (registry / "qemu-aarch64").exists():
        (registry / "register").write_bytes(Path("/usr/lib/binfmt.d/qemu-aarch64.conf").read_bytes().strip())


def make(name: str, system: System) -> Path:
    """Make the folder of a system, unless it is there."""
    root = ROOM / name
    if root.exists():
        return root
    ROOM.mkdir(parents=True, exist_ok=True)
    partly = ROOM / f".{name}"
    shutil.rmtree(partly, ignore_errors=True)
    packages = ["musl"] if system.is_musl else PACKAGES
    options = [f"--architectures={system.architecture}", "--variant=extract", f"--include={','.join(packages)}"]
    # A mirror of the suite that changes daily may be a few weeks old.
    options += ["--aptopt=Acquire::Check-Valid-Until false"] if system.suite == "sid" else []
    subprocess.run(["mmdebstrap", "--quiet", *options, system.suite, partly, MIRROR], check=True)
    if system.is_musl:
        (partly / "lib").symlink_to("usr/lib")
        runpy.run_path(str(TREE / ".ci/musl.py"))["add_python"](partly)
    (partly / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
    (partly / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    partly.rename(root)
    return root


def entering(root: Path) -> list[str]:
    return ["unshare", "--mount", "--pid", "--fork", "bash", "-c", ENTER, "enter", str(root)]


def wheel(end: str) -> Path:
    (found,) = DIST.glob(f"moonpool-*-{end}.whl")
    return found


def clean_environment() -> dict[str, str]:
    """Return the variables that pip needs, without those that set how Python behaves."""
    names = [name for name in os.environ if name.startswith("PIP_") or name in ("HOME", "http_proxy", "https_proxy")]
    return {name: os.environ[name] for name in names} | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


def try_out(
    name: str,
    enter: list[str],
    python: str,
    environment: str,
    file: str,
    programs: list[list[str]],
    longest: float = LONGEST,
    largest: float = LARGEST,
) -> bool:
    """Install a wheel in a new environment, unless that is empty, and run programs. Returns whether that worked, in
    time, and was small.
    """
    variables = clean_environment()

    def do(*command: str) -> str:
        done = subprocess.run(
            [*enter, *command], env=variables, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    try:
        if environment:
            do(python, "-m", "venv", "--clear", environment)
            python = f"{environment}/bin/python"
        began = time.monotonic()
        if environment:
            do(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", file)
        installed = time.monotonic()
        for program in programs:
            do(python, *program)
        ended = time.monotonic()
        told = json.loads(do(python, "-c", SIZES))
    except RuntimeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return False
    own = {each: size / 1e6 for each, size in told["sizes"].items() if each not in ("pip", "setuptools")}
    seconds, megabytes = ended - began, sum(own.values())
    print(
        f"{name}: Python {told['python']}, "
        f"{seconds:.0f} s ({installed - began:.0f} s pip, {ended - installed:.0f} s moonpool), "
        f"{megabytes:.1f} MB ({', '.join(f'{each} {size:.1f}' for each, size in sorted(own.items()))})",
        flush=True,
    )
    wrong = [f"longer than {longest:.0f} s"] if seconds > longest else []
    wrong += [f"larger than {largest} MB"] if megabytes > largest else []
    if wrong:
        print(f"{name}: {' and '.join(wrong)}", file=sys.stderr)
    return not wrong


def install_from_outside(file: Path, system: System, root: Path) -> None:
    """Install a wheel for the Python of a system, without starting that."""
    (library,) = (root / "usr/lib").glob("python3.*")
    version = library.name.removeprefix("python")
    target = library / "site-packages" if system.is_musl else root / "usr/local/lib" / library.name / "dist-packages"
    shutil.rmtree(target, ignore_errors=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--only-binary=:all:"]
    options += [f"--platform={each}" for each in system.platforms]
    options += [f"--python-version={version}", f"--target={target}"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, file], check=True)


def try_system(name: str) -> bool:
    system = SYSTEMS[name]
    emulated = is_emulated(system)
    if emulated:
        register_emulator()
    root, file = make(name, system), wheel(system.wheel)
    if emulated or system.is_musl:
        install_from_outside(file, system, root)
        programs = [["-c", ANSWER]] if emulated else [DEMO, ["-m", "moonpool", "sandbox"], ["-c", STRICT]]
        return try_out(name, entering(root), "/usr/bin/python3", "", "", programs, system.longest, system.largest)
    shutil.copy(file, root)
    return try_out(name, entering(root), "/usr/bin/python3", "/opt/venv", f"/{file.name}", [DEMO], system.longest)


def pythons_here() -> dict[str, str]:
    """Return the versions of Python on this machine that moonpool supports, and one interpreter of each."""
    found = runpy.run_path(str(TREE / ".ci/environments.py"))
    every = {found["OWN"]: sys.executable, **found["others"]()}
    return {f"here-{version[0]}.{version[1]}": python for version, python in every.items() if version >= (3, 11)}


def try_python(name: str, python: str) -> bool:
    file = wheel(f"manylinux_2_28_{platform.machine()}")
    return try_out(name, [], python, str(ROOM / name), str(file), [DEMO])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    here = pythons_here()
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=f"of {', '.join([*SYSTEMS, *here])}")
    asked = parser.parse_args().systems or [*SYSTEMS, *here]
    if unknown := set(asked) - {*SYSTEMS, *here}:
        parser.error(f"there is no system {', '.join(sorted(unknown))}")
    failed = [name for name in asked if not (try_system(name) if name in SYSTEMS else try_python(name, here[name]))]
    if failed:
        sys.exit(f"{len(failed)} of {len(asked)} systems failed: {', '.join(failed)}")
    print(f"{len(asked)} systems installed the wheel and ran the demo")


if __name__ == "__main__":
    main()
