# The parts of numpy's table, of Python and of the core in C++ that `_port.pyx` stands on.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as flag
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "<string_view>" namespace "std":
    cdef cppclass string_view:
        string_view()
        string_view(const char*, size_t)
        const char* data()
        size_t size()


cdef extern from "numpy_table.h" namespace "moonpool::numpy":
    ctypedef struct Array:
        char* data
        int nd
        int64_t* dims
        void* base
        void* descr
        int flags
    const int kContiguous
    flag is_array(object)
    Array* fields(object)
    uint64_t bytes_of(object, uint64_t)
    object view(type, object descr, int nd, const int64_t* dims, char* data, int64_t alignment, object base)
    object view_on "moonpool::numpy::view"(type, object descr, int nd, const int64_t* dims, char* data,
                                           int64_t alignment, object base, flag is_writeable)
    flag load(object, int64_t, int64_t, int64_t) except False


cdef extern from "sources.h" namespace "moonpool::python":
    int add_sources(object) except -1


cdef extern from "<sys/socket.h>" nogil:
    ssize_t c_send "send"(int, const void*, size_t, int) noexcept
    ssize_t c_recv "recv"(int, void*, size_t, int) noexcept
    const int MSG_DONTWAIT, MSG_NOSIGNAL


cdef inline int find_table(example) except -1:
    """Find numpy's table, which each extension has for itself. Raises `ImportError`.

    `example` is an array of 2 by 3.
    """
    try:
        load(example, example.__array_interface__["data"][0], 2, 3)
    except (AttributeError, ValueError) as error:
        raise ImportError(f"numpy's table is not where this file looks for it: {error}") from error
    return 0


cdef extern from "clock.h" namespace "moonpool":
    int64_t monotonic_ns() nogil


cdef extern from "msgpack.h" namespace "moonpool":
    cdef cppclass Writer:
        void clear()
        string_view bytes()
        # These grow, and there may be no memory for that.
        void nil() except +
        void flag(flag) except +
        void text(string_view) except +
        void uint(uint64_t) except +
        void integer(int64_t) except +
        void real(double) except +
        void array(size_t) except +
        void map(size_t) except +
        void raw(string_view) except +
        void values(string_view) except +


cdef extern from "place.h" namespace "moonpool":
    ctypedef struct PlacedTensor:
        uint64_t index, datatype
        const int64_t* shape
        uint64_t dims, size, block, offset
    flag place(const vector[uint32_t]&, vector[PlacedTensor]&, uint64_t*)
    void write_layout(Writer&, const vector[uint32_t]&, const vector[PlacedTensor]&) except +


cdef extern from "wire.h" namespace "moonpool::wire":
    ctypedef struct Block:
        uint64_t region, offset, size
    const uint64_t kNoCore, kMaxPacketBytes
    const uint64_t kExecute "static_cast<uint64_t>(moonpool::wire::Kind::EXECUTE)"
    const uint64_t kAnswer "static_cast<uint64_t>(moonpool::wire::Kind::ANSWER)"
    const uint64_t kReply "static_cast<uint64_t>(moonpool::wire::Kind::REPLY)"
    const uint64_t kAlignment
    const uint8_t* kItemBytes "moonpool::wire::kItemBytes.data()"


cdef extern from "channel.h" namespace "moonpool":
    uint64_t current_core()


cdef extern from "copy.h" namespace "moonpool":
    void copy(char*, const char*, size_t) noexcept nogil


cdef extern from "answer.h" namespace "moonpool":
    ctypedef struct OutputLayout:
        uint32_t index, datatype, dims
        uint64_t block, offset, size, elements
    cdef cppclass AnswerLayout:
        AnswerLayout(const vector[string]&) except +
        size_t responses()
        size_t first(size_t)
        const vector[OutputLayout]& outputs()
        const int64_t* shape(const OutputLayout&)
    flag is_strings(const char*, uint64_t, uint64_t)


cdef extern from "port.h" namespace "moonpool":
    uint64_t block_bytes(uint64_t)
    cdef cppclass PlainAnswer:
        flag read(string_view packet, uint64_t batch, size_t requests, AnswerLayout& layout)
        uint64_t core
        vector[Block] blocks
    flag read_apart(Writer& room, const Block& block, string_view packed, AnswerLayout& layout)


cdef class RequestBase:
    cdef public object allocator, arrays, attempts, details, durations_ns, priority, response, responses, shapes
    cdef public object signature, states, targets, timeout_us, trace, userp, waiter
    cdef public int64_t batch_size, queued_ns, responded_ns
    cdef public bint fills_place, has_views, is_cancelled, left, takes_devices, wants_wire

    cpdef detail(self, details)


cdef class LentBlocks:
    cdef object __weakref__
    cdef public object first, lock
    cdef public list lent, targets
    cdef public dict spares


cdef class ExecutingBatch:
    cdef public object lock
    cdef public tuple executing
    cdef public set ended


cdef bint is_view(array) except -1
cdef lease_on(region, buffer, Block block, release)


cdef class LaneEnd:
    """Declares what the lane calls of a port. The head of `RuntimePort` in `__init__.py` says what each does."""

    # Who has the answers for those that do not ask the port: the link.
    cdef public object link

    cpdef bint put(self, requests) except -1
    cpdef bint wait(self) except -1
    cpdef bint wait_alone(self) except -1
    cpdef wait_until(self, int64_t deadline_ns, bint is_alone)
    cpdef take(self, requests)
