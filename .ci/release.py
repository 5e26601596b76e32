"""Makes what a release is: a source distribution and wheels, with their bills of materials and checksums.

    python .ci/release.py                     everything, from the commit that is checked out
    python .ci/release.py x86_64-linux-musl   the source distribution and the wheel of one target

Theory of operation. What is built is the commit, unpacked into a folder of its own, so nothing of the tree that is not
committed gets in. One compiler serves all targets: zig's, which is installed from a wheel, and brings each C library,
in the version that a target names, and each processor. nghttp2 is compiled from Debian's source package, with its
security patches, whose signature apt checks. Every time stamp is the commit's, every path relative, and every version
of a tool is written here, so that twice the same commit can give twice the same bytes. auditwheel, which knows what a
wheel with such a tag may use, says what it thinks of each.

Needs Debian or Ubuntu with apt, dpkg-dev and patch, git, make and Python 3.11.
"""

from __future__ import annotations

import argparse
import email
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import uuid
import zipfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

TREE = Path(__file__).resolve().parent.parent
ROOM = TREE / "build/release"
TOOLS = ROOM / "tools"
SOURCE = ROOM / "source"
DIST = TREE / "dist"
PACKAGES = [
    "auditwheel==6.8.2",
    "build==1.6.1",
    "cyclonedx-python-lib[json-validation]==11.12.0",
    "cython==3.3.1",
    "setuptools==84.2.1",
    "wheel==0.48.0",
    "ziglang==0.17.1",
]
NGHTTP2 = "libnghttp2.so.14"
NGHTTP2_LICENSE = "MIT"


@dataclass(frozen=True)
class Target:
    """A kind of machine that has a wheel of its own."""

    name: str
    """As zig calls it, with the oldest version of the C library."""
    platform: str
    """The tag of the wheel."""

    @property
    def has_glibc(self) -> bool:
        return "-gnu" in self.name


TARGETS = [
    Target("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    Target("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    Target("x86_64-linux-musl", "musllinux_1_2_x86_64"),
    Target("aarch64-linux-musl", "musllinux_1_2_aarch64"),
]


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Run a command and return what it printed. If it fails, print all of that and end the program."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **variables},
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        sys.exit(f"{shlex.join(map(str, command))} failed with status {done.returncode}")
    return done.stdout


def install_tools() -> None:
    if not (TOOLS / "bin/python").exists():
        run(sys.executable, "-m", "venv", TOOLS)
    run(TOOLS / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES)


def compilers(target: Target) -> dict[str, str]:
    """Return the variables that name the compilers of a target: a program of one word each, as Makefiles want it.

    No path of this machine gets into what they compile, and no debugging information of the C++ library, which would be
    most of a wheel.
    """
    folder = ROOM / "bin" / target.name
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for variable, language in (("CC", "cc"), ("CXX", "c++")):
        program = folder / language
        options = (
            f"-target {target.name} -ffile-prefix-map={SOURCE}=. -Wl,--strip-debug -Wno-unused-command-line-argument"
        )
        program.write_text(f'#!/bin/sh\nexec {TOOLS}/bin/python -m ziglang {language} {options} "$@"\n')
        program.chmod(0o755)
        made[variable] = str(program)
    return made


def epoch() -> str:
    return run("git", "log", "-1", "--format=%ct", cwd=TREE).strip()


def unpack_commit() -> None:
    """Unpack the commit into a folder of its own."""
    if run("git", "status", "--porcelain", cwd=TREE):
        print("What is not committed is left out of the release.", file=sys.stderr)
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=TREE, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(SOURCE, filter="tar")


def source_distribution() -> Path:
    """Build it, and pack it anew: setuptools gives the files today's date and this user's name."""
    folder = ROOM / "sdist"
    shutil.rmtree(folder, ignore_errors=True)
    run(TOOLS / "bin/python", "-m", "build", "--no-isolation", "--sdist", "--outdir", folder, SOURCE)
    (built,) = folder.glob("*.tar.gz")
    plain = io.BytesIO()
    with tarfile.open(built) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = int(epoch()), 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
    made = DIST / built.name
    made.write_bytes(gzip.compress(plain.getvalue(), mtime=0))
    return made


def nghttp2_source() -> tuple[Path, str]:
    """Return the unpacked source of nghttp2 and its version in Debian."""
    folder = ROOM / "nghttp2"
    if not list(folder.glob("nghttp2-*/lib")):
        state = folder / "apt"
        for each in ("lists/partial", "cache/archives/partial", "sources"):
            (state / each).mkdir(parents=True, exist_ok=True)
        # The sources of what this machine takes its packages from.
        for file in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").iterdir()]:
            if file.is_file():
                text = re.sub(r"(?m)^(deb|Types: *deb)(?=\s)", r"\1-src", file.read_text())
                (state / "sources" / file.name).write_text(text)
        options = [
            f"--option=Dir::Etc::SourceList={state}/sources/sources.list",
            f"--option=Dir::Etc::SourceParts={state}/sources",
            f"--option=Dir::State::Lists={state}/lists",
            f"--option=Dir::Cache={state}/cache",
            "--option=APT::Sandbox::User=root",
        ]
        run("apt-get", *options, "update")
        run("apt-get", *options, "source", "nghttp2", cwd=folder)
    (found,) = [each for each in folder.glob("nghttp2-*") if each.is_dir()]
    (description,) = folder.glob("nghttp2_*.dsc")
    return found, description.stem.partition("_")[2]


def nghttp2(target: Target) -> Path:
    """Compile nghttp2, as a library that needs nothing but a C library."""
    source, _ = nghttp2_source()
    made = ROOM / "nghttp2" / target.name / NGHTTP2
    made.parent.mkdir(exist_ok=True)
    # What `configure` would find and fill in.
    defined = ["ARPA_INET_H", "CLOCK_GETTIME", "DECL_CLOCK_MONOTONIC", "NETINET_IN_H", "TIME_H"]
    defined = [f"-DHAVE_{each}=1" for each in defined] + ["-DBUILDING_NGHTTP2"]
    version = source.name.removeprefix("nghttp2-")
    number = "0x" + "".join(f"{int(each):02x}" for each in version.split("."))
    header = source / "lib/includes/nghttp2/nghttp2ver.h"
    text = header.with_suffix(".h.in").read_text()
    header.write_text(text.replace("@PACKAGE_VERSION@", version).replace("@PACKAGE_VERSION_NUM@", number))
    files = sorted((source / "lib").glob("*.c"))
    compiler = compilers(target)["CC"]
    options = [
        "-O2",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-Wl,-soname," + NGHTTP2,
        f"-ffile-prefix-map={source}=.",
    ]
    run(compiler, *options, *defined, "-I", source / "lib/includes", *files, "-o", made)
    return made


def wheel(sdist: Path, target: Target) -> Path:
    """Build a wheel from the source distribution."""
    folder = ROOM / "wheel-source"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="tar")
    (source,) = folder.iterdir()
    out = ROOM / "wheels" / target.name
    shutil.rmtree(out, ignore_errors=True)
    variables = {
        **compilers(target),
        "_PYTHON_HOST_PLATFORM": target.platform,
        "MOONPOOL_BUILD_NGHTTP2": str(nghttp2(target)),
        "MOONPOOL_BUILD_TRITON": "1" if target.has_glibc else "0",
        "SOURCE_DATE_EPOCH": epoch(),
    }
    log = run(TOOLS / "bin/python", "-m", "build", "--no-isolation", "--wheel", "--outdir", out, source, **variables)
    (built,) = out.glob("*.whl")
    check(built, target, log)
    made = DIST / built.name
    shutil.copyfile(built, made)
    return made


def check(built: Path, target: Target, log: str) -> None:
    """End the program unless everything is in the wheel. Print what auditwheel says of it."""
    names = zipfile.ZipFile(built).namelist()
    compiled = {each.rpartition("/")[2] for each in names if each.endswith(".so")}
    wanted = set(re.findall(r"_\w+\.abi3\.so", " ".join(expected_extensions())))
    if missing := wanted - compiled:
        print(log, file=sys.stderr)
        sys.exit(f"{built.name} lacks {', '.join(sorted(missing))}")
    if not any(each.endswith(NGHTTP2) for each in names):
        sys.exit(f"{built.name} lacks nghttp2")
    if target.has_glibc and "libtriton_moonpool.so" not in compiled:
        print(log, file=sys.stderr)
        sys.exit(f"{built.name} lacks the library for tritonserver")
    told = json.loads(run(TOOLS / "bin/auditwheel", "show", "--json", built))
    print(f"{built.name}: {built.stat().st_size / 1e6:.1f} MB, auditwheel: {told}")


def expected_extensions() -> list[str]:
    code = "import runpy; print(*[each.name for each in runpy.run_path('setup.py')['EXTENSIONS']])"
    names = run(TOOLS / "bin/python", "-c", code, cwd=SOURCE).split()
    return [f"{each.rpartition('.')[2]}.abi3.so" for each in names]


def bill_of_materials(built: Path) -> None:
    """Write what is in a wheel, and what it is installed with, in CycloneDX's form, and check the form."""
    with zipfile.ZipFile(built) as packed:
        (named,) = [each for each in packed.namelist() if each.endswith(".dist-info/METADATA")]
        told = email.message_from_bytes(packed.read(named))
    _, nghttp2_version = nghttp2_source()
    name, version = told["Name"], told["Version"]
    root = {
        "type": "library",
        "bom-ref": "moonpool",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}?file_name={built.name}",
        "licenses": [{"license": {"id": told["License-Expression"]}}],
        "hashes": [{"alg": "SHA-256", "content": sha256(built)}],
    }
    bundled = {
        "type": "library",
        "bom-ref": "nghttp2",
        "name": "nghttp2",
        "version": nghttp2_version,
        "purl": f"pkg:deb/debian/nghttp2@{quote(nghttp2_version)}?arch=source",
        "licenses": [{"license": {"id": NGHTTP2_LICENSE}}],
    }
    required = [each for each in told.get_all("Requires-Dist", []) if "extra ==" not in each]
    installed = []
    for each in required:
        (package,) = re.findall(r"^[\w.-]+", each)
        range_of = {"name": "moonpool:requires", "value": each}
        installed.append(
            {"type": "library", "bom-ref": package, "name": package, "purl": f"pkg:pypi/{package.lower()}"}
            | {"scope": "required", "properties": [range_of]}
        )
    parts = [bundled, *installed]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, sha256(built))}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(int(epoch()), UTC).isoformat().replace("+00:00", "Z"),
            "component": root,
        },
        "components": parts,
        "dependencies": [
            {"ref": "moonpool", "dependsOn": [each["bom-ref"] for each in parts]},
            *({"ref": each["bom-ref"]} for each in parts),
        ],
    }
    made = built.with_name(f"{built.name}.cdx.json")
    made.write_text(json.dumps(document, indent=2) + "\n")
    run(TOOLS / "bin/python", "-c", VALIDATE, made)


VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read())
sys.exit(str(wrong) if wrong else 0)
"""


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help="one of " + ", ".join(each.name for each in TARGETS)
    )
    asked = parser.parse_args().targets
    if unknown := set(asked) - {each.name for each in TARGETS}:
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    install_tools()
    unpack_commit()
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    sdist = source_distribution()
    for target in TARGETS:
        if not asked or target.name in asked:
            bill_of_materials(wheel(sdist, target))
    made = sorted(DIST.iterdir())
    (DIST / "SHA256SUMS").write_text("".join(f"{sha256(each)}  {each.name}\n" for each in made))
    print(f"{len(made)} files and their checksums are in {DIST}")


if __name__ == "__main__":
    main()
