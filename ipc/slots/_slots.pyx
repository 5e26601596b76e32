# distutils: language = c++
# cython: language_level=3, binding=False, annotation_typing=False
# cython: boundscheck=True, wraparound=True, nonecheck=True, overflowcheck=True
"""A work channel in memory, for Python. `ipc/native/slot.h` says how it works, and `ipc/channel.py` what its methods
do: this is a `Channel` in all that a work channel needs.

No signal handler runs inside a method but between two sleeps, when no message has been taken. While the interpreter's
lock is given up, no frame has anything to clean up: an interpreter that ends takes such a thread away.

Closing. Any thread may close a channel while another one waits in it. Its descriptors and its memory stay until nobody
is inside, so no number is used again under a waiter. `_inside` changes only under the interpreter's lock.
"""

from collections import deque

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t

from moonpool.ipc.port._port cimport add_sources, kMaxPacketBytes, string_view

import os
import sys

from moonpool.ipc.errors import Closed, LocalProtocolError, PeerGone, RemoteProtocolError

cdef extern from "look.h" namespace "moonpool":
    cdef cppclass Counter "std::atomic<uint64_t>":
        uint64_t load()
    cdef cppclass Looks:
        Counter made, hits
    Looks looks

add_sources(sys.modules[__name__])
# A moment that has passed: for a wait that does not sleep.
cdef int64_t AT_ONCE = 1


def counts():
    """Return how often threads of this process looked for a message, and how often it came meanwhile."""
    return {"looks": looks.made.load(), "hits": looks.hits.load()}


cdef class SlotChannel:
    """One end of a work channel in memory. One thread at a time sends and receives; `wake` and `close` are for any."""

    def __cinit__(self):
        self.inbox = deque()

    @staticmethod
    def offer():
        """Return an end for the runtime, and four descriptors for the stub, which the caller owns. Raises `OSError`."""
        cdef SlotChannel made = SlotChannel.__new__(SlotChannel)
        cdef Offer offer
        if not made._slots.make(offer):
            raise OSError(errno, os.strerror(errno))
        return made, [offer.makers.release(), offer.peers.release(), offer.bell.release(), offer.ring.release()]

    @staticmethod
    def taken(fds):
        """Return the end for the stub, which owns the descriptors from now on, even if this raises `OSError`."""
        cdef SlotChannel made = SlotChannel.__new__(SlotChannel)
        cdef int makers, peers, bell, ring
        makers, peers, bell, ring = fds
        if not made._slots.take(makers, peers, bell, ring):
            raise OSError(errno, os.strerror(errno))
        return made

    def fileno(self):
        """Return the descriptor that is readable when the peer has rung; -1 if closed.

        When it is readable, `is_ready` tells if the peer has sent anything.
        """
        return -1 if self._is_closed else self._slots.fd()

    @property
    def descriptor(self):
        return self.fileno

    @property
    def has_received(self):
        return len(self.inbox) > 0 or self._is_over

    @property
    def was_taken(self):
        """False if the peer has not taken the last message, as far as it tells."""
        return self._slots.was_taken()

    cdef int _check(self) except -1:
        if self._is_closed or not self._slots.is_open():
            raise Closed("this end of the channel was closed")
        return 0

    def send(self, bytes packet):
        """Put a packet into the slot, and ring if the peer may be asleep. Never blocks."""
        self.put(string_view(PyBytes_AsString(packet), PyBytes_Size(packet)))

    send_waiting = send

    cdef int put(self, string_view packet) except -1:
        """Do what `send` does."""
        self._check()
        cdef size_t size = packet.size()
        if not 0 < size <= kMaxPacketBytes:
            raise LocalProtocolError(f"a packet cannot be sent: it has {size} bytes")
        if self._slots.has_ended():
            raise PeerGone("the peer closed the channel")
        if not self._slots.send(packet):
            # A model may have closed it, and its own end of the peer's as well.
            raise PeerGone("the bell of the peer was closed")
        return 0

    cdef int copy_and_announce(self, char* target, const char* source, size_t size) except -1:
        """Copy the last large tensor of the next packet, and let the peer wake up meanwhile. Lets other threads run."""
        self._check()
        self._inside += 1
        with nogil:
            self._slots.copy_and_announce(target, source, size)
        self._leave(kNothing)
        return 0

    cpdef bint wait(self, int64_t deadline_ns=0, int64_t look_ns=0) except -1:
        """Wait until `receive` does not block. Returns False if that is not so at the deadline, of a monotonic clock.

        0 is no deadline. A signal handler may end it without loss of a packet.
        """
        cdef Got got
        while not len(self.inbox):
            PyErr_CheckSignals()
            if self._is_closed or not self._slots.is_open():
                return True
            self._inside += 1
            with nogil:
                got = self._slots.wait(deadline_ns, look_ns)
            self._leave(got)
            if got == kNothing:
                return False
            if got != kInterrupted:
                return True
            look_ns = 0
        return True

    def wait_until(self, deadline):
        """Wait as `wait` does. `deadline` is of `time.monotonic`, None for none."""
        # A moment that is over is no deadline that is 0.
        return self.wait(0 if deadline is None else max(AT_ONCE, <int64_t>(<double>deadline * 1e9)))

    cpdef bint look(self, int64_t look_ns) except -1:
        """Look for a packet for a moment, where that has helped lately. Returns True if `receive` would not block."""
        cdef Got got
        if len(self.inbox) or self._is_closed or not self._slots.is_open():
            return True
        self._inside += 1
        with nogil:
            got = self._slots.look(look_ns)
        self._leave(got)
        return got != kNothing

    cdef int _leave(self, Got got) except -1:
        """Come out of a wait.

        A message is in the inbox from here on, and the end is known: the bell may tell neither again.
        """
        try:
            if got == kMessage and not self._is_closed:
                # Only this copy is read. Without memory for it, the message stays.
                self.inbox.append(PyBytes_FromStringAndSize(self._slots.message().data(), self._slots.message().size()))
                self._slots.taken()
            elif got == kEnded or got == kBroken:
                self._is_over = True
        finally:
            self._inside -= 1
            if self._is_closed and not self._inside:
                self._slots.close()
        return 0

    def is_ready(self):
        """Return True if `receive` would not block.

        For those who were woken by the descriptor, which may be rung for nothing. Empties the bell, and takes the
        message: `has_received` tells of it from here on.
        """
        cdef Got got
        if len(self.inbox) or self._is_closed or not self._slots.is_open():
            return True
        self._inside += 1
        got = self._slots.check()
        self._leave(got)
        return got != kNothing

    def receive(self):
        """Return the next packet. Blocks.

        Raises `PeerGone` at the end, and `RemoteProtocolError` for what is no packet.
        """
        if not len(self.inbox):
            self.wait(0, self.look_ns)
        return self._received()

    def receive_ready(self):
        """Return the next packet, or None if there is none yet. Never blocks. Raises as `receive` does."""
        if not len(self.inbox) and not self.wait(AT_ONCE):
            return None
        return self._received()

    cdef _received(self):
        if len(self.inbox):
            return self.inbox.popleft()
        self._check()
        if self._slots.has_ended():
            gone = PeerGone("the peer closed the channel")
            gone.was_taken = self.was_taken
            raise gone
        if self._slots.false_size():
            raise RemoteProtocolError(f"a packet of more than {kMaxPacketBytes} bytes")
        raise RemoteProtocolError("a packet came out of turn or is empty, or the peer rings without sending one")

    def wake(self):
        """End the conversation. A thread that waits wakes and sees that. Any thread may call it."""
        if not self._is_closed and self._slots.is_open():
            self._slots.end()

    def close(self):
        """Close this end, once nobody is inside. May be called many times."""
        self.wake()
        self._is_closed = True
        if not self._inside:
            self._slots.close()
