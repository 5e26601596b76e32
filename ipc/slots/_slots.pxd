# One end of a work channel in memory, for those that send and wait without a call of Python's.

from libc.stdint cimport int64_t, uint64_t

from moonpool.ipc.port._port cimport flag, string_view


cdef extern from "channel.h" namespace "moonpool":
    cdef cppclass Descriptor:
        Descriptor()
        Descriptor(int)
        int release()


cdef extern from "slot.h" namespace "moonpool":
    cdef enum Got "moonpool::Slots::Got":
        kMessage "moonpool::Slots::Got::kMessage"
        kNothing "moonpool::Slots::Got::kNothing"
        kInterrupted "moonpool::Slots::Got::kInterrupted"
        kEnded "moonpool::Slots::Got::kEnded"
        kBroken "moonpool::Slots::Got::kBroken"
    cdef cppclass Offer "moonpool::Slots::Offer":
        Descriptor makers, peers, bell, ring
    cdef cppclass Slots:
        flag make(Offer&)
        flag take(int, int, int, int)
        flag is_open()
        flag has_ended()
        int fd()
        flag send(string_view)
        void copy_and_announce(char*, const char*, size_t) nogil
        Got wait(int64_t, int64_t) nogil
        Got look(int64_t) nogil
        Got check()
        string_view message()
        uint64_t false_size()
        void taken()
        flag was_taken()
        void end()
        void close()


cdef class SlotChannel:
    cdef Slots _slots
    cdef int _inside
    cdef bint _is_closed
    # Nothing comes any more: the peer is gone or has broken the protocol, and that was seen.
    cdef bint _is_over
    # For how long `receive` looks for a message before it sleeps.
    cdef public int64_t look_ns
    # As in `Channel`.
    cdef readonly object inbox

    cdef int put(self, string_view packet) except -1
    cdef int copy_and_announce(self, char* target, const char* source, size_t size) except -1
    cpdef bint wait(self, int64_t deadline_ns=*, int64_t look_ns=*) except -1
    cpdef bint look(self, int64_t look_ns) except -1
    cdef int _check(self) except -1
    cdef int _leave(self, Got got) except -1
    cdef _received(self)
