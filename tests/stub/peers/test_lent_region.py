"""Tests memory of clients in a stub: a private view, which is renewed or left to the model."""

from __future__ import annotations

import os
import resource
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
from tests.stub.closing import close_regions
from tests.waiting import wait_until

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import Side
from moonpool.ipc.region import SharedRegion
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.batch import Target
from moonpool.stub.peers.placement import Placer
from moonpool.stub.peers.regions import LentRegion, Regions

_PAGE = 4096
_BYTES = 4 * _PAGE


class Lent:
    """Holds a client's shared memory, to which the client writes by `fd`, and the stub's region of it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("client", os.MFD_CLOEXEC)
        os.truncate(self.fd, _BYTES)
        self.write(1)
        self.region = LentRegion(1, _BYTES, os.dup(self.fd))
        self.returned: deque[object] = deque()

    def write(self, value: int) -> None:
        os.pwrite(self.fd, bytes([value]) * _BYTES, 0)

    def lease(self) -> np.ndarray:
        return self.region.lease(0, _BYTES, self.returned.append, (1, 0))

    def close(self) -> None:
        self.region.close()
        os.close(self.fd)


@pytest.fixture(params=["with pagemap", "without pagemap"])
def lent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lent]:
    if request.param == "without pagemap":
        monkeypatch.setattr("moonpool.stub.peers.regions._PAGEMAP", "/proc/self/no-such-file")
    made = Lent()
    yield made
    made.close()


def test_a_model_s_writes_to_an_input_are_gone_in_the_next_batch(lent: Lent) -> None:
    lease = lent.lease()
    lease[5000] = 7
    lent.write(2)
    assert lease[5000] == 7
    assert os.pread(lent.fd, 1, 5000) == b"\2"
    del lease

    lent.region.renew([(0, _BYTES)])
    assert (lent.lease() == 2).all()


@pytest.mark.parametrize(("count", "gpus"), [(0, ()), (1, ("/dev/null",))])
def test_pages_are_looked_at_where_faults_of_the_process_do_not_tell_of_all_writes(
    monkeypatch: pytest.MonkeyPatch, count: int, gpus: tuple[str, ...]
) -> None:
    known = resource.getrusage(resource.RUSAGE_SELF)
    same = type(known)([count] * len(known))
    monkeypatch.setattr(resource, "getrusage", lambda _: same)
    monkeypatch.setattr("moonpool.stub.peers.regions._GPUS", gpus)
    lent = Lent()
    for value in (2, 3):
        assert (lent.lease() == value - 1).all()
        lent.lease()[5000] = 7
        lent.write(value)
        lent.region.renew([(0, _BYTES)])
    assert (lent.lease() == 3).all()
    lent.close()


def test_pages_that_were_only_read_stay_where_they_are(lent: Lent) -> None:
    first = lent.lease()
    address = first.__array_interface__["data"]
    assert (first == 1).all()
    del first
    lent.region.renew([(0, _BYTES)])
    lent.write(3)

    second = lent.lease()
    assert second.__array_interface__["data"] == address
    assert (second == 3).all()


def test_pages_are_looked_at_if_the_process_has_had_page_faults(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    lent.region._has_all_faults = True  # also on a machine with a GPU
    looks: list[int] = []
    pread = os.pread

    def looked(*where: int) -> bytes:
        looks.append(0)
        return pread(*where)

    monkeypatch.setattr(os, "pread", looked)

    def renewed(*, is_written: bool) -> bool:
        """Execute a batch, and return whether its pages were looked at in the end."""
        lease = lent.lease()
        if is_written:
            lease[5000] = 7
        del lease
        looks.clear()
        lent.region.renew([(0, _BYTES)])
        return bool(looks)

    # Anything in this process may cause a fault.
    wait_until(lambda: not renewed(is_written=False), 30)
    assert renewed(is_written=True)
    assert (lent.lease() == 1).all()


def test_a_kept_input_is_a_copy_and_the_next_batch_sees_the_client_s_bytes(lent: Lent) -> None:
    kept = lent.lease()
    lent.region.give_up([(0, _BYTES)])
    lent.write(4)

    assert (kept == 1).all()
    assert (lent.lease() == 4).all()


def test_an_output_is_the_client_s_at_once(lent: Lent) -> None:
    lent.region.write(_PAGE, np.full(3, 9, np.uint8))
    assert os.pread(lent.fd, 5, _PAGE - 1) == b"\1\t\t\t\1"


def test_an_object_that_is_too_short_is_an_error(lent: Lent) -> None:
    os.truncate(lent.fd, _PAGE)
    with pytest.raises(RemoteProtocolError, match="client's shared memory cannot be mapped"):
        lent.lease()
    with pytest.raises(RemoteProtocolError, match="client's shared memory cannot be mapped"):
        lent.region.write(0, np.zeros(1, np.uint8))


@pytest.mark.promise(
    "At the limits",
    "A client that cuts its memory short after a request loses that response; the others of the batch are complete.",
)
def test_nothing_is_left_of_a_response_whose_target_is_too_short(lent: Lent) -> None:
    os.truncate(lent.fd, _PAGE)
    regions = Regions(lambda *_, **__: None)
    answers = SharedRegion.create(2, 1 << 16)
    regions.add_first(2, 1 << 16, os.dup(answers.fd), Side.STUB)
    placer = Placer(regions, {"outputs": ["Y", "V"]})
    made = InferenceResponse([Tensor(name, np.ones(4, np.float32)) for name in ("Y", "V")])
    blocks: list[list[int]] = []
    try:
        layout, remark = placer.answer(made, ["Y", "V"], blocks, None, {0: Target(lent.region, 0, _BYTES)})
        assert layout is None
        assert remark is not None
        assert "client's shared memory cannot be mapped" in remark[1][1]
        # The next response of the batch starts with no blocks.
        assert blocks == []
        # All of the memory is free.
        regions.allocate((1 << 16) - 64)
    finally:
        close_regions(regions)
        answers.close()
