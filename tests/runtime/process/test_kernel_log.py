"""A record of the kernel's log names the call that a process was ended for, if it is of that process."""

from __future__ import annotations

import pytest

from moonpool.runtime.process.diagnose import call_in

pytestmark = pytest.mark.promise("Seeing sandboxes", "If its filter ends a …")

RECORD = (
    b"5,928,12304833449,-;audit: type=1326 audit(1795389936.529:928): auid=4294967295 uid=0 gid=0 "
    b'ses=4294967295 pid=10532 comm="python" exe="/usr/bin/python3.11" sig=31 arch=c000003e '
    b"syscall=101 compat=0 ip=0x7f33edf1f829 code=0x80000000\n"
)
AT_S = 12304.8


def test_the_call_is_named() -> None:
    assert call_in(RECORD, 10532, AT_S - 60) == "ptrace"


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (RECORD.replace(b"syscall=101", b"syscall=9999"), "number 9999"),
        (RECORD.replace(b"c000003e", b"40000003"), "number 101 of another kind of machine"),
        (RECORD.replace(b"sig=31", b"sig=0"), ""),
        (RECORD.replace(b"type=1326", b"type=1327"), ""),
        (b"12,1,1,-;a text of a program that says audit: type=1326 pid=10532", ""),
        (b"", ""),
        (b"\xff\xfe", ""),
    ],
)
def test_a_record_of_something_else_says_so(record: bytes, name: str) -> None:
    assert call_in(record, 10532, 0.0) == name


def test_a_record_of_another_process_names_nothing() -> None:
    assert call_in(RECORD, 10533, 0.0) == ""
    assert call_in(RECORD, 10532, AT_S + 60) == "", "that number was another process's then"
