# The port of a calls channel, for its dispatcher.

from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as flag
from libcpp.vector cimport vector

from moonpool.ipc.port._port cimport Block, Writer, string_view


cdef extern from "call.h" namespace "moonpool":
    ctypedef struct Place "moonpool::wire::Place":
        uint64_t region, offset
    ctypedef struct NamedLayout:
        string_view name
        uint64_t datatype, dims, block, offset, size
    cdef cppclass PlainCall:
        flag read(string_view packet)
        const int64_t* shape(const NamedLayout&)
        uint64_t call, timeout_us
        int64_t version
        flag decoupled
        string_view model, details
        vector[Place] released
        vector[Block] blocks
        vector[NamedLayout] tensors
        vector[string_view] outputs


cdef struct Copied:
    uint64_t datatype, size, offset


cdef class CallPort:
    cdef object _channel, _inbox, _fileno, _blocks, _regions, _released, _release, _wire_tensor
    cdef public bint is_plain
    # The INFER that was read.
    cdef PlainCall _said
    cdef bytes _packet

    cpdef receive(self)
    cpdef read(self, bytes packet)
    cpdef inputs(self)
    cpdef reply(self, uint64_t number, bint is_last, response)
    cpdef bint send(self, bytes packet) except -1
    cdef _region_of(self, Block block)
    cdef bint _place(self, response, Writer* rest, vector[Copied]* copied, list raws, uint64_t* size) except -1
    cdef int _write(self, Writer* rest, name, shape, raw, Copied* each) except -1
    cdef _take_block(self, uint64_t size)
    cdef bint _copy(self, list raws, const vector[Copied]& copied, block) except -1
    cdef int _take_released(self, list taken) except -1
    cdef int _undo(self, block, list taken) except -1
