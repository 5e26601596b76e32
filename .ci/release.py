"""Makes what a release is: a source distribution and wheels, with their bills of materials and checksums.

    python .ci/release.py                     everything, from the commit that is checked out
    python .ci/release.py x86_64-linux-musl   the source distribution and the wheel of one target

Theory of operation. What is built is the commit, unpacked into a folder of its own, so nothing of the tree that is not
committed gets in. One compiler serves all targets: zig's, which is installed from a wheel, and brings each C library,
in the version that a target names, and each processor. All targets are built in one folder, one after the other, so
Cython works once, and both processors compile. nghttp2 is compiled from Debian's source package, with its security
patches, whose signature apt checks. Every time stamp is the commit's, every path relative, and every version of a tool
is written here, so that twice the same commit gives twice the same bytes, as long as nghttp2's package is the same.

A wheel is refused if auditwheel finds that it needs more than its tag allows, if a library in it shows more than it
must, or if something is missing. The licenses of what is inside are listed and included.

Needs Debian or Ubuntu with apt, dpkg-dev and patch, git, make and Python 3.11.
"""

from __future__ import annotations

import argparse
import base64
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
from typing import Any
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
LLVM = "Apache-2.0 WITH LLVM-exception"
# Of moonpool, and of what is linked into the files of a wheel.
LICENSES = f"Apache-2.0 AND {LLVM} AND MIT"
# What each kind of library in a wheel shows.
SHOWN = [
    (r".*\.abi3\.so", r"PyInit_\w+"),
    (r"libnghttp2\.so\.14", r"nghttp2_\w+"),
    (r"libtriton_moonpool\.so", r"TRITONBACKEND_\w+|moonpool_required_functions"),
]


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


def run(*command: str | Path, cwd: Path | None = None, timeout_s: float | None = None, **variables: str) -> str:
    """Run a command and return what it printed. If it fails, print all of that and end the program, as after
    `timeout_s`.
    """
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env={**os.environ, **variables},
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        sys.exit(str(error))
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

    No path of this machine gets into what they compile, and no debugging information, which would be most of a wheel.
    What zig makes for itself lies in a folder that a clean clone does not have.
    """
    folder = ROOM / "bin" / target.name
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for variable, language in (("CC", "cc"), ("CXX", "c++")):
        program = folder / language
        caches = f"export ZIG_GLOBAL_CACHE_DIR={ROOM}/zig ZIG_LOCAL_CACHE_DIR={ROOM}/zig"
        options = f"-target {target.name} -Wl,--strip-debug -Wno-unused-command-line-argument"
        command = f'exec {TOOLS}/bin/python -m ziglang {language} {options} "$@" -g0'
        program.write_text(f"#!/bin/sh\n{caches}\n{command}\n")
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


def debian_source(folder: Path, sources: dict[str, str], *options: str) -> None:
    """Fetch a source package into a folder with `apt-get source` and these options, from these lists of sources."""
    state = folder / "apt"
    for each in ("lists/partial", "cache/archives/partial", "sources"):
        (state / each).mkdir(parents=True, exist_ok=True)
    for name, text in sources.items():
        (state / "sources" / name).write_text(text)
    every = [
        f"--option=Dir::Etc::SourceList={state}/sources/sources.list",
        f"--option=Dir::Etc::SourceParts={state}/sources",
        f"--option=Dir::State::Lists={state}/lists",
        f"--option=Dir::Cache={state}/cache",
        "--option=APT::Sandbox::User=root",
    ]
    run("apt-get", *every, "update")
    run("apt-get", *every, "source", *options, cwd=folder)


def own_sources() -> dict[str, str]:
    """Return the lists of what this machine takes its packages from, with their sources."""
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").iterdir()]
    # A line, or a paragraph.
    return {
        file.name: re.sub(r"(?m)^(deb|Types: *deb)(?=\s)", r"\1-src", file.read_text())
        for file in files
        if file.is_file()
    }


def nghttp2_source() -> tuple[Path, str]:
    """Return the unpacked source of nghttp2 and its version in Debian."""
    folder = ROOM / "nghttp2"
    if not list(folder.glob("nghttp2-*/lib")):
        debian_source(folder, own_sources(), "nghttp2")
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
    options = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname," + NGHTTP2, "-Iincludes"]
    run(compiler, *options, *defined, *(each.name for each in files), "-o", made, cwd=source / "lib")
    return made


def unpack_source(sdist: Path) -> Path:
    """Unpack the source distribution that the wheels are built from."""
    folder = ROOM / "wheel-source"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="tar")
    (source,) = folder.iterdir()
    return source


def wheel(source: Path, target: Target) -> Path:
    """Build a wheel in the folder of the source distribution, where Cython's work for another target is used again."""
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
    (out / "log").write_text(log)
    made = DIST / built.name
    add_licenses(built, made, licenses(), tuple(datetime.fromtimestamp(int(epoch()), UTC).timetuple()[:6]))
    check(made, target, log)
    return made


def licenses() -> dict[str, bytes]:
    """Return the text of each license of what is linked into a wheel."""
    (package,) = TOOLS.glob("lib/python3*/site-packages/ziglang")
    files = {
        "nghttp2": nghttp2_source()[0] / "COPYING",
        "libcxx": package / "lib/libcxx/LICENSE.TXT",
        "libcxxabi": package / "lib/libcxxabi/LICENSE.TXT",
        "libunwind": package / "lib/libunwind/LICENSE.TXT",
        "zig": package / "LICENSE",
    }
    return {f"{name}.txt": file.read_bytes() for name, file in files.items()}


def add_licenses(built: Path, made: Path, texts: dict[str, bytes], moment: tuple[int, ...]) -> None:
    """Copy a wheel, with these licenses in its folder for licenses, its description and its list of files."""
    with zipfile.ZipFile(built) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        (record,) = [each for each in old.namelist() if each.endswith(".dist-info/RECORD")]
        folder = record.removesuffix("RECORD")
        added = {f"{folder}licenses/{name}": text for name, text in sorted(texts.items())}
        lines = []
        for info in old.infolist():
            data = old.read(info)
            if info.filename == record:
                continue
            if info.filename == f"{folder}METADATA":
                data = with_licenses(data.decode(), list(texts)).encode()
            lines.append(add_file(new, info.filename, data, info.external_attr, moment))
        regular = (0o100644) << 16
        lines += [add_file(new, name, data, regular, moment) for name, data in added.items()]
        add_file(new, record, "".join([*lines, f"{record},,\n"]).encode(), regular, moment)


def add_file(packed: zipfile.ZipFile, name: str, data: bytes, attributes: int, moment: tuple[int, ...]) -> str:
    """Add a file to a wheel. Returns its line in the list of files."""
    info = zipfile.ZipInfo(name, (*moment[:5], moment[5] // 2 * 2))  # type: ignore[arg-type]
    info.external_attr, info.compress_type = attributes, zipfile.ZIP_DEFLATED
    packed.writestr(info, data)
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(data)}\n"


def with_licenses(description: str, names: list[str]) -> str:
    """Return a wheel's description with the licenses of all that is in it, and with the names of these files."""
    head, blank, body = description.partition("\n\n")
    lines = [
        f"License-Expression: {LICENSES}" if each.startswith("License-Expression:") else each
        for each in head.split("\n")
    ]
    last = max(place for place, each in enumerate(lines) if each.startswith(("License-File:", "License-Expression:")))
    lines[last + 1 : last + 1] = [f"License-File: {name}" for name in sorted(names)]
    return "\n".join(lines) + blank + body


def check(built: Path, target: Target, log: str) -> None:
    """End the program unless everything is in the wheel, and nothing that its tag does not allow."""
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
    with zipfile.ZipFile(built) as packed:
        if telling := [each for each in names if str(TREE).encode() in packed.read(each)]:
            sys.exit(f"{built.name} has the path of this machine's files in {', '.join(telling)}")
    # Not this machine's libraries, which would be those of another C library.
    nothing = ROOM / "nothing"
    nothing.mkdir(exist_ok=True)
    told = json.loads(first_object(run(TOOLS / "bin/auditwheel", "show", "--ldpaths", nothing, "--json", built)))
    symbols = json.loads(run(TOOLS / "bin/python", "-c", SYMBOLS, built))
    if wrong := [*more_than_allowed(told, target.platform), *shown_too_much(symbols)]:
        sys.exit(f"{built.name} must not be released:\n  " + "\n  ".join(wrong))
    print(f"{built.name}: {built.stat().st_size / 1e6:.1f} MB, accepted for {target.platform}", flush=True)


def first_object(text: str) -> str:
    """Return the object of JSON in what a program printed with its warnings."""
    return text[text.index("{") : text.rindex("}") + 1]


def more_than_allowed(told: dict[str, Any], platform: str) -> list[str]:
    """Return what auditwheel found in a wheel that its tag does not allow."""
    needed = set(told["external_libs"])
    if platform.startswith("musllinux") and needed == {"libc.so"}:
        # zig gives musl's library the name that musl gives it. musl's loader takes each `libc.…` for itself, so also
        # the name that Alpine gives it, which is all that auditwheel knows.
        needed, told = set(), {**told, "overall_tag": told["sym_tag"]}
    wrong = [f"it needs {name}, which is not in it" for name in sorted(needed)]
    if told["unsupported_isa"]:
        wrong.append("it needs a newer processor")
    found, allowed = (re.fullmatch(r"(\w+linux)_(\d+)_(\d+)_(\w+)", tag) for tag in (told["overall_tag"], platform))
    if allowed is None:
        raise ValueError(f"{platform!r} is no tag of a wheel for many machines")
    if found is None or found[1] != allowed[1] or found[4] != allowed[4]:
        return [*wrong, f"auditwheel calls it {told['overall_tag']}, not {platform}"]
    if tuple(map(int, found.group(2, 3))) > tuple(map(int, allowed.group(2, 3))):
        wrong.append(f"it needs {told['overall_tag']}, a newer C library: {told['versioned_symbols']}")
    return wrong


def shown_too_much(symbols: dict[str, list[str]]) -> list[str]:
    """Return the symbols that libraries show and need not, and libraries that nobody knows."""
    wrong = []
    for file, names in symbols.items():
        (pattern,) = [shown for named, shown in SHOWN if re.fullmatch(named, file.rpartition("/")[2])] or [""]
        if extra := [name for name in names if not re.fullmatch(pattern, name)]:
            wrong.append(f"{file} shows {', '.join(extra[:10])}")
        elif not names:
            wrong.append(f"{file} shows nothing")
    return wrong


# Prints the symbols that each library of a wheel shows.
SYMBOLS = """
import io, json, sys, zipfile
from elftools.elf.elffile import ELFFile
shown = {}
packed = zipfile.ZipFile(sys.argv[1])
for name in packed.namelist():
    if name.endswith(".so") or ".so." in name:
        table = ELFFile(io.BytesIO(packed.read(name))).get_section_by_name(".dynsym")
        shown[name] = sorted(
            each.name for each in table.iter_symbols()
            if each.name and each["st_shndx"] != "SHN_UNDEF" and each["st_info"]["bind"] != "STB_LOCAL"
        )
print(json.dumps(shown))
"""


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
    root = component(name, version, f"pkg:pypi/{name}@{version}?file_name={built.name}", LICENSES)
    root["hashes"] = [{"alg": "SHA-256", "content": sha256(built)}]
    bundled = [
        component("nghttp2", nghttp2_version, f"pkg:deb/debian/nghttp2@{quote(nghttp2_version)}?arch=source", "MIT"),
        *(component(each, llvm_version(), f"pkg:generic/{each}@{llvm_version()}", LLVM) for each in LINKED),
        component("ziglang", version_of("ziglang"), f"pkg:pypi/ziglang@{version_of('ziglang')}", "MIT"),
    ]
    required = [each for each in told.get_all("Requires-Dist", []) if "extra ==" not in each]
    installed = []
    for each in required:
        (package,) = re.findall(r"^[\w.-]+", each)
        range_of = {"name": "moonpool:requires", "value": each}
        installed.append(
            {"type": "library", "bom-ref": package, "name": package, "purl": f"pkg:pypi/{package.lower()}"}
            | {"scope": "required", "properties": [range_of]}
        )
    parts = [*bundled, *installed]
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


# Linked into each library in a wheel, from zig's sources of it; ziglang is the package that has them, and its own
# runtime.
LINKED = ["libcxx", "libcxxabi", "libunwind"]


def component(name: str, version: str, url: str, license_: str) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "version": version,
        "purl": url,
        "licenses": [{"expression": license_}],
    }


def version_of(package: str) -> str:
    (version,) = [each.partition("==")[2] for each in PACKAGES if each.startswith(f"{package}==")]
    return version


def llvm_version() -> str:
    """Return the version of LLVM whose libraries zig compiles."""
    (file,) = TOOLS.glob("lib/python3*/site-packages/ziglang/lib/libcxx/include/__config")
    (number,) = re.findall(r"define _LIBCPP_VERSION (\d+)", file.read_text())
    major, minor, patch = int(number) // 10000, int(number) // 100 % 100, int(number) % 100
    return f"{major}.{minor}.{patch}"


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
    source = unpack_source(source_distribution())
    for target in TARGETS:
        if not asked or target.name in asked:
            bill_of_materials(wheel(source, target))
    made = sorted(DIST.iterdir())
    (DIST / "SHA256SUMS").write_text("".join(f"{sha256(each)}  {each.name}\n" for each in made))
    print(f"{len(made)} files and their checksums are in {DIST}")


if __name__ == "__main__":
    main()
