"""A release refuses some wheels and adds licenses to others, and a build asks for a compiler where there is none."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.programs import load_program

ROOT = Path(__file__).parent.parent
CI = ROOT / ".ci"
DESCRIPTION = (
    "Metadata-Version: 2.4\nName: moonpool\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\n\n# moonpool\n"
)
MOMENT = (2026, 11, 29, 12, 30, 31)

pytestmark = pytest.mark.skipif(not CI.is_dir(), reason="only the tests are here, without what makes a release")


@pytest.fixture(scope="module")
def release() -> Any:
    return load_program(CI / "release.py")


def told(**changes: Any) -> dict[str, Any]:
    """Return what auditwheel prints of a wheel."""
    usual = {"external_libs": {}, "unsupported_isa": False, "overall_tag": "manylinux_2_17_x86_64"}
    return {**usual, "versioned_symbols": {"libc.so.6": ["GLIBC_2.17"]}, **changes}


@pytest.mark.parametrize("tag", ["manylinux_2_5_x86_64", "manylinux_2_28_x86_64"])
def test_a_wheel_may_need_what_its_tag_allows(release: Any, tag: str) -> None:
    assert release.more_than_allowed(told(overall_tag=tag), "manylinux_2_28_x86_64") == []


@pytest.mark.parametrize(
    "changes",
    [
        {"overall_tag": "manylinux_2_34_x86_64"},
        {"overall_tag": "linux_x86_64"},
        {"overall_tag": "manylinux_2_17_aarch64"},
        {"overall_tag": "musllinux_1_2_x86_64"},
        {"external_libs": {"libfoo.so.1": None}},
        {"unsupported_isa": True},
    ],
)
def test_a_wheel_that_needs_more_is_refused(release: Any, changes: dict[str, Any]) -> None:
    assert len(release.more_than_allowed(told(**changes), "manylinux_2_28_x86_64")) == 1


def test_musl_s_own_name_of_the_c_library_is_that_of_the_c_library(release: Any) -> None:
    found = told(overall_tag="linux_x86_64", sym_tag="musllinux_1_2_x86_64", external_libs={"libc.so": None})
    assert release.more_than_allowed(found, "musllinux_1_2_x86_64") == []
    assert len(release.more_than_allowed(found, "manylinux_2_28_x86_64")) == 2
    found["external_libs"]["libstdc++.so.6"] = None
    assert len(release.more_than_allowed(found, "musllinux_1_2_x86_64")) == 3


def test_each_target_has_a_tag_that_can_be_compared(release: Any) -> None:
    for target in release.TARGETS:
        assert release.more_than_allowed(told(overall_tag=target.platform), target.platform) == []


def test_a_library_that_shows_more_than_it_must_is_refused(release: Any) -> None:
    folder = "moonpool/runtime/server/grpc"
    good = {f"{folder}/_wire.abi3.so": ["PyInit__wire"], f"{folder}/libnghttp2.so.14": ["nghttp2_version"]}
    assert release.shown_too_much(good) == []
    for name, symbols in (
        (f"{folder}/_wire.abi3.so", ["PyInit__wire", "__cxa_throw"]),
        ("libx.so", ["x"]),
        ("_y.abi3.so", []),
    ):
        (wrong,) = release.shown_too_much({**good, name: symbols})
        assert wrong.startswith(name)


def test_a_wheel_names_and_has_the_licenses_of_what_is_inside(release: Any, tmp_path: Path) -> None:
    folder = "moonpool-1.dist-info"
    built, made, again = (tmp_path / f"{name}.whl" for name in ("built", "made", "again"))
    with zipfile.ZipFile(built, "w") as packed:
        packed.writestr("moonpool/__init__.py", "x = 1\n")
        packed.writestr(f"{folder}/METADATA", DESCRIPTION)
        packed.writestr(f"{folder}/RECORD", "stale")
    texts = {"zlib.txt": b"zlib's", "a.txt": b"a's"}

    for target in (made, again):
        release.add_licenses(built, target, texts, MOMENT)

    assert made.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(made) as packed:
        assert {each.date_time for each in packed.infolist()} == {(2026, 11, 29, 12, 30, 30)}
        head, _, body = packed.read(f"{folder}/METADATA").decode().partition("\n\n")
        assert body == "# moonpool\n"
        assert [line for line in head.split("\n") if line.startswith("License")] == [
            f"License-Expression: {release.LICENSES}",
            "License-File: LICENSE",
            "License-File: a.txt",
            "License-File: zlib.txt",
        ]
        assert packed.read(f"{folder}/licenses/a.txt") == b"a's"
        record = list(csv.reader(io.StringIO(packed.read(f"{folder}/RECORD").decode())))
        assert [name for name, _, _ in record] == packed.namelist()
        for name, digest, size in record[:-1]:
            data = packed.read(name)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert int(size) == len(data)
        assert record[-1] == [f"{folder}/RECORD", "", ""]


def test_a_filter_of_system_calls_depends_on_the_capabilities(tmp_path: Path) -> None:
    container: Any = load_program(CI / "container.py")
    rules = [
        {"names": ["read"], "action": "SCMP_ACT_ALLOW", "args": [], "includes": {}, "excludes": {}},
        {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["mount"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["s390_pci_mmio_read"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["s390"]}},
    ]
    container.FILTER = tmp_path / "seccomp.json"
    container.FILTER.write_text(
        json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "syscalls": rules})
    )

    few, many = container.filter_of_calls([]), container.filter_of_calls(["CAP_SYS_ADMIN"])

    assert [(each["names"], each["action"]) for each in few["syscalls"]] == [
        (["read"], "SCMP_ACT_ALLOW"),
        (["mount"], "SCMP_ACT_ERRNO"),
    ]
    assert [(each["names"], each["action"]) for each in many["syscalls"]] == [
        (["read"], "SCMP_ACT_ALLOW"),
        (["mount"], "SCMP_ACT_ALLOW"),
    ]
    assert few["defaultErrnoRet"] == 38


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return setup.py on a machine with make and Python's headers, and without a compiler."""
    monkeypatch.chdir(ROOT)
    # It changes these, which `monkeypatch` puts back.
    for variable, command in (("CC", "gcc"), ("CXX", "g++"), ("LDSHARED", "gcc"), ("LDCXXSHARED", "g++")):
        monkeypatch.setenv(variable, command)
    for variable in ("MOONPOOL_BUILD_EXTENSIONS", "MOONPOOL_BUILD_TRITON"):
        monkeypatch.delenv(variable, raising=False)
    made = load_program(ROOT / "setup.py")
    monkeypatch.setattr(made.shutil, "which", lambda name: None if name == "g++" else f"/usr/bin/{name}")
    monkeypatch.setattr(made.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(made, "has_headers", lambda: True)
    monkeypatch.setattr(made, "has_lock", lambda: True)
    return made


def test_a_build_without_a_compiler_asks_for_one_that_is_installed_from_a_wheel(
    setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert setup.build_requirements() == [setup.ZIG]

    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda _: object())
    assert setup.build_requirements() == []
    assert len(setup.extensions()) == 1 + len(setup.EXTENSIONS)
    # One for all processors of a kind, not for that of this machine.
    assert " -m ziglang c++ -target " in setup.os.environ["CXX"]
    assert " -m ziglang cc -target " in setup.os.environ["CC"]


@pytest.mark.parametrize(("lack", "says"), [("has_headers", "no Python.h"), ("has_lock", "no lock in this Python")])
def test_a_build_that_cannot_have_extensions_says_so_and_asks_for_nothing(
    setup: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lack: str, says: str
) -> None:
    monkeypatch.setattr(setup, lack, lambda: False)
    assert setup.build_requirements() == []

    monkeypatch.setenv("CXX", "c++")
    assert [each.name for each in setup.extensions()] == [setup.LIBRARY]
    assert f"moonpool is built without extensions: there is {says}" in capsys.readouterr().out
