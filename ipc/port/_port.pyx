# distutils: language = c++
# cython: language_level=3, binding=False, annotation_typing=False
# cython: boundscheck=True, wraparound=True, nonecheck=True, overflowcheck=True
"""The compiled form of `__init__.py`, which says what everything here is for. Both give the same.

No signal handler runs inside a method, except where it calls Python's code: at hooks that a comment names, and where a
garbage collection ends an object. So objects are made first, and what others see is changed after that.

While the interpreter's lock is given up, no frame has anything to clean up: an interpreter that ends takes such a
thread away.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.vector cimport vector

from moonpool.ipc.slots._slots cimport SlotChannel

from _thread import allocate_lock, get_ident

import sys

import numpy as np

from moonpool.ipc.codec import pack
from moonpool.ipc.arena import Block as _Block
from moonpool.ipc.errors import BadTensor, MoonpoolError, RemoteProtocolError
from moonpool.ipc.memory import SHARED_BYTES, Lease
from moonpool.ipc.messages import Kind
from moonpool.ipc.tensors import BYTES, DTYPES, decode_bytes

cdef extern from *:
    """
    #include <sys/socket.h>
    // True if `recv` would not block. It takes nothing.
    static inline bool has_packet(int fd) {
      return recv(fd, nullptr, 0, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR);
    }
    """
    bint has_packet(int) noexcept nogil

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*) except NULL
    int64_t PyLong_AsLongLongAndOverflow(object, int*) except? -1
    bint PyDict_Next(object, Py_ssize_t*, PyObject**, PyObject**)

add_sources(sys.modules[__name__])
find_table(np.ones((2, 3), np.float32))

cdef object _ndarray = np.ndarray
cdef object _u1 = np.dtype(np.uint8)
cdef object _object = np.dtype(np.object_)
cdef object _nowhere = {}
cdef tuple _no_batch = (0, ())
# By datatype; None for those that are looked up at their first use, and for strings.
cdef list _descrs = [DTYPES[code] if code in DTYPES else None for code in range(15)]
cdef int _BYTES = BYTES
cdef int64_t _SHARED_BYTES = SHARED_BYTES
cdef object _EXECUTE = int(Kind.EXECUTE)
cdef object _ANSWER = int(Kind.ANSWER)
# As in `Channel`: a longer packet is recognized by one byte more.
cdef enum:
    ROOM = 32769
    # A copy from this size on takes so long that others should have the interpreter meanwhile.
    LONG_COPY_BYTES = 262144
    # After a look that did not find the answer, so many requests go without one: looking costs processor time, and
    # tells only by trying if it would help now.
    RESTS = 63
    # What fits into a packet beside all else.
    MOST_RELEASED = 1024
    # As in `Memo`.
    MOST_SHAPES = 256


# A moment that has passed: for a wait that does not sleep.
cdef int64_t AT_ONCE = 1
# More than any machine has.
cdef int64_t MOST_BYTES = 1 << 46


# This module lies below those of the runtime.
cdef object _response_type, _wire_tensor_type, _tensor_type


def use(response_type, wire_tensor_type, tensor_type):
    """Make objects of these classes from now on. For the module that has them."""
    global _response_type, _wire_tensor_type, _tensor_type
    _response_type, _wire_tensor_type, _tensor_type = response_type, wire_tensor_type, tensor_type


# For tests: a method that always declines would pass all others.
cdef struct Counts:
    uint64_t request, request_in, put, wait, take, apart, copied_bytes

cdef Counts _counts


def counts():
    """Return how often each method did its work."""
    return dict(_counts)


cdef struct Row:
    uint64_t number, datatype, size
    size_t first_dim
    uint32_t dims


cdef class Shapes:
    cdef vector[Row] _rows
    cdef vector[int64_t] _dims
    cdef public object batch_size, signature, is_shared
    cdef list _tensors

    def __init__(self, list tensors, batch_size, signature, *, is_shared):
        self.batch_size, self.signature, self.is_shared = batch_size, signature, is_shared
        self._tensors = tensors
        for number, datatype, shape, size in tensors:
            for dim in shape:
                self._dims.push_back(dim)
            self._add(number, datatype, len(shape), size)

    cdef int _add(self, uint64_t number, uint64_t datatype, uint32_t dims, uint64_t size) except -1:
        """Add a tensor whose dimensions are the last ones that were added."""
        cdef Row row
        row.number, row.datatype, row.size = number, datatype, size
        row.first_dim, row.dims = self._dims.size() - dims, dims
        self._rows.push_back(row)
        return 0

    @property
    def tensors(self):
        if self._tensors is None:
            tensors = []
            for i in range(<Py_ssize_t>self._rows.size()):
                row = self._rows[i]
                shape = [self._dims[row.first_dim + k] for k in range(row.dims)]
                tensors.append(_tensor_type(row.number, row.datatype, shape, row.size))
            self._tensors = tensors
        return self._tensors


cdef class RequestBase:
    def __cinit__(self):
        self.priority = self.timeout_us = self.queued_ns = self.attempts = self.responses = self.responded_ns = 0
        self.wants_wire = self.takes_devices = self.left = self.is_cancelled = self.fills_place = False
        self.targets = _nowhere

    def __init__(self, arrays, shapes, details=None, *, has_views=True):
        self.arrays, self.shapes, self.has_views = arrays, shapes, has_views
        self.batch_size, self.signature = shapes.batch_size, shapes.signature
        if details is not None:
            self.detail(details)

    cpdef detail(self, details):
        self.details = details
        self.priority, self.timeout_us = details.priority, details.timeout_us


cdef class LentBlocks:
    def __init__(self, first):
        self.first, self.lock = first, allocate_lock()
        self.lent, self.targets, self.spares = [], [], {}


cdef class ExecutingBatch:
    def __init__(self):
        self.lock, self.executing, self.ended = allocate_lock(), _no_batch, set()


cdef struct Wanted:
    size_t first_dim
    uint32_t dims
    int datatype
    bint is_ragged


cdef extern from *:
    """
    namespace {
    struct Sent {
      int64_t offset, size;
      // True if it lies in memory of so many bytes.
      bool lies_in(int64_t bytes) const { return offset >= 0 && size >= 0 && size <= bytes && offset <= bytes - size; }
    };

    // Returns a number that a client sent, or -1 for one that no place, size or dimension can be.
    inline int64_t number_in(PyObject* number) {
      int is_beyond = 0;
      if (!PyLong_Check(number)) return -1;
      const long long found = PyLong_AsLongLongAndOverflow(number, &is_beyond);
      return is_beyond != 0 || found < 0 ? -1 : found;
    }
    }  // namespace
    """
    cdef cppclass Sent:
        int64_t offset, size
        bint lies_in(int64_t)
    int64_t number_in(object)


cdef class Spec:
    cdef object _kind
    cdef list _names, _dtypes
    # The place of each input in the configuration, by its name.
    cdef dict _numbers
    cdef vector[Wanted] _inputs
    cdef vector[int64_t] _dims
    cdef int64_t _max_batch_size
    cdef bint _is_usual
    # The shapes that came before, by their dimensions. Others remember by these objects what follows from them.
    cdef dict _known

    def __init__(self, kind, list inputs, max_batch_size):
        self._kind, self._max_batch_size = kind, max_batch_size
        self._names, self._dtypes, self._numbers, self._known = [], [], {}, {}
        self._is_usual = bool(inputs)
        cdef Wanted wanted
        for name, datatype, dims, is_ragged, is_reshaped in inputs:
            dtype = _descrs[datatype]
            # Strings are encoded first, and the dtype of BF16 is perhaps not there yet.
            if dtype is None or is_reshaped:
                self._is_usual = False
            self._numbers[name] = len(self._names)
            self._names.append(name)
            self._dtypes.append(dtype)
            wanted.first_dim, wanted.dims = self._dims.size(), len(dims)
            wanted.datatype, wanted.is_ragged = datatype, is_ragged
            for dim in dims:
                self._dims.push_back(dim)
            self._inputs.push_back(wanted)

    cpdef request(self, inputs):
        if not self._is_usual or type(inputs) is not dict or len(<dict>inputs) != len(self._names):
            return None
        cdef list arrays = []
        cdef bint has_views = False
        cdef Array* seen
        cdef Py_ssize_t i
        cdef int k
        cdef vector[int64_t] dims
        for i in range(len(self._names)):
            found = (<dict>inputs).get(self._names[i])
            if found is None or not is_array(found):
                return None
            seen = fields(found)
            if <PyObject*>seen.descr is not <PyObject*>self._dtypes[i]:
                return None
            if seen.nd != self._nd(i):
                return None
            for k in range(seen.nd):
                dims.push_back(seen.dims[k])
            has_views = has_views or seen.base != NULL
            arrays.append(found)
        shapes = self._shapes(dims)
        if shapes is None:
            return None
        if has_views:
            # Python's code may run from here on, and other threads.
            has_views = any([is_view(found) for found in arrays])
        _counts.request += 1
        return made(self._kind, arrays, shapes, has_views)

    def request_in(self, described, data, int64_t offset, sent, bint has_views, lend=None):
        if not self._is_usual or type(described) is not list or len(<list>described) != len(self._names):
            return None
        cdef Py_buffer memory
        PyObject_GetBuffer(data, &memory, PyBUF_SIMPLE)
        try:
            return self._request_in(described, data, &memory, offset, sent, has_views, lend)
        finally:
            PyBuffer_Release(&memory)

    cdef _request_in(self, list described, data, Py_buffer* memory, int64_t offset, sent, bint has_views, lend):
        cdef Py_ssize_t count = len(self._names), i, number, used = 0
        cdef vector[Sent] tensors
        cdef list found = [None] * count, leases = [None] * count
        cdef vector[int64_t] dims
        cdef Shapes shapes
        cdef Row row
        if offset < 0 or offset > memory.len:
            return None
        if sent is not None and type(sent) is not list:
            return None
        tensors.resize(count)
        for i in range(count):
            name, code, shape, place, size_bytes, values = described[i]
            at = self._numbers.get(name)
            if at is None or values is not None:
                return None
            number = at
            if found[number] is not None or code != self._inputs[number].datatype:
                return None
            found[number] = shape
            if place is not None:
                lease = self._lent(lend, place)
                if type(lease) is not Lease:
                    return None
                leases[number], has_views = lease, True
                tensors[number].offset, tensors[number].size = 0, fields(lease).dims[0]
                continue
            if sent is None:
                tensors[number].offset, tensors[number].size = offset, number_in(size_bytes)
            else:
                if used == len(<list>sent):
                    return None
                at, size_bytes = (<list>sent)[used]
                used += 1
                tensors[number].offset, tensors[number].size = number_in(at), number_in(size_bytes)
                if tensors[number].offset < 0 or tensors[number].offset > memory.len - offset:
                    return None
                tensors[number].offset += offset
            if not tensors[number].lies_in(memory.len):
                return None
            offset = offset if sent is not None else tensors[number].offset + tensors[number].size
        if offset != memory.len if sent is None else used != len(<list>sent):
            return None
        for i in range(count):
            if len(found[i]) != self._nd(i):
                return None
            for dim in found[i]:
                dims.push_back(number_in(dim))
        shapes = self._shapes(dims)
        if shapes is None:
            return None
        cdef list arrays = []
        for i in range(count):
            row = shapes._rows[i]
            # An empty one has no place.
            if row.size == 0 or row.size != <uint64_t>tensors[i].size:
                return None
            lease = leases[i]
            if lease is not None:
                # It stands for the client's bytes, which nobody writes here.
                arrays.append(view_on(_ndarray, self._dtypes[i], row.dims, shapes._dims.data() + row.first_dim,
                                      fields(lease).data, kItemBytes[row.datatype], lease, False))
                continue
            arrays.append(view_on(_ndarray, self._dtypes[i], row.dims, shapes._dims.data() + row.first_dim,
                                  <char*>memory.buf + tensors[i].offset, kItemBytes[row.datatype], data,
                                  not memory.readonly))
        cdef RequestBase request = made(self._kind, arrays, shapes, has_views)
        request.wants_wire = True
        _counts.request_in += 1
        return request

    cdef _lent(self, lend, place):
        """Return a lease on a place in memory of a client, None if it must be copied or refused.

        Calls Python's code.
        """
        if lend is None:
            return None
        try:
            return lend(*place)
        except Exception:
            return None  # Python's form meets the same

    cdef int _nd(self, Py_ssize_t number):
        """Return the number of dimensions of an input, with that of rows."""
        return <int>self._inputs[number].dims + (1 if self._max_batch_size > 0 else 0)

    cdef Shapes _shapes(self, const vector[int64_t]& dims):
        """Return the shapes of all inputs, with these dimensions one behind another, as many as each has.

        Returns None if they do not fit the configuration, or no array is that large.
        """
        cdef int64_t rows = -1, dim
        cdef Wanted wanted
        cdef size_t i, k, at = 0, lead = 1 if self._max_batch_size > 0 else 0
        for i in range(self._inputs.size()):
            wanted = self._inputs[i]
            if lead:
                if rows >= 0 and dims[at] != rows:
                    return None
                rows = dims[at]
                if rows <= 0 or rows > self._max_batch_size:
                    return None
            for k in range(wanted.dims):
                dim = dims[at + lead + k]
                if dim < 0 or self._dims[wanted.first_dim + k] not in (-1, dim):
                    return None
            at += lead + wanted.dims
        known = PyBytes_FromStringAndSize(<const char*>dims.data(), dims.size() * sizeof(int64_t))
        shapes = self._known.get(known)
        if shapes is None:
            shapes = self._shapes_of(dims, lead)
            if shapes is not None:
                if len(self._known) >= MOST_SHAPES:
                    self._known.clear()
                self._known[known] = shapes
        return shapes

    cdef Shapes _shapes_of(self, const vector[int64_t]& dims, size_t lead):
        """Return the shapes of all inputs, with these dimensions one behind another; None if no array is that large."""
        cdef Shapes shapes = Shapes.__new__(Shapes)
        cdef vector[int64_t] key
        cdef Wanted wanted
        cdef int64_t size, dim
        cdef size_t i, k, at = 0, count
        shapes._rows.reserve(self._inputs.size())
        shapes._dims.reserve(dims.size())
        key.reserve(dims.size() + 2 * self._inputs.size())
        for i in range(self._inputs.size()):
            wanted = self._inputs[i]
            size = kItemBytes[wanted.datatype]
            count = wanted.dims + lead
            key.push_back(i)
            key.push_back(-1 if wanted.is_ragged else <int64_t>wanted.dims)
            for k in range(count):
                dim = dims[at + k]
                if dim > 0 and size > MOST_BYTES // dim:
                    return None  # it lies in less memory than it seems to, and Python says what is wrong
                size *= dim
                shapes._dims.push_back(dim)
                if k >= lead and not wanted.is_ragged:
                    key.push_back(dim)
            at += count
            shapes._add(i, wanted.datatype, count, size)
        shapes.is_shared = True
        shapes.batch_size = dims[0] if lead else 1
        if lead:
            shapes.signature = PyBytes_FromStringAndSize(<const char*>key.data(), key.size() * sizeof(int64_t))
        return shapes


cdef made(kind, list arrays, Shapes shapes, bint has_views):
    cdef RequestBase request = kind.__new__(kind)
    request.arrays, request.shapes, request.has_views = arrays, shapes, has_views
    request.batch_size, request.signature = shapes.batch_size, shapes.signature
    return request


cdef lease_on(region, buffer, Block block, release):
    """Return a lease on a block of a region with this memory, which goes to `release` in the end."""
    cdef Py_buffer memory
    cdef int64_t size = block.size
    PyObject_GetBuffer(buffer, &memory, PyBUF_WRITABLE)
    cdef char* at = <char*>memory.buf + block.offset
    PyBuffer_Release(&memory)
    lease = view(Lease, _u1, 1, &size, at, 1, buffer)
    lease.token = (block.region, block.offset)
    lease.region, lease.offset = region, block.offset
    # The last one: with it the lease holds the block.
    lease.give_back = release
    return lease


cdef bint is_view(array) except -1:
    """Return True if stubs may see the memory of an array where it lies: `is_lendable` in ipc/memory.py."""
    if fields(array).base == NULL:
        return False
    base = <object>fields(array).base
    while isinstance(base, _ndarray):
        if type(base) is Lease:
            token = getattr(base, "token", None)
            if token is not None:
                return type(token) is not tuple or array.nbytes >= _SHARED_BYTES
        if fields(base).base == NULL:
            return False
        base = <object>fields(base).base
    return False


cdef strings(raw, tuple shape, uint64_t count):
    """Return the strings in an array of bytes, or None if it does not hold exactly so many."""
    # A copy, which the stub cannot change.
    cdef bytes data = bytes(raw)
    cdef const char* at = PyBytes_AsString(data)
    cdef uint32_t length
    cdef list elements = []
    if not is_strings(at, PyBytes_Size(data), count):
        return None
    for _ in range(count):
        memcpy(&length, at, 4)
        elements.append(PyBytes_FromStringAndSize(at + 4, length))
        at += 4 + length
    array = np.empty(count, _object)
    array[:] = elements
    return array.reshape(shape)


cdef class Elsewhere:
    """The tensors of a batch that are not copied: blocks that others wrote, and places where clients want outputs."""

    cdef LentBlocks _blocks
    # Rows of EXECUTE: region, offset and size of each, for targets behind request and output.
    cdef list lent, targets

    def __init__(self, blocks):
        self._blocks, self.lent, self.targets = blocks, [], []

    cdef bint lend(self, RequestBase request, uint64_t index, PlacedTensor* tensors, uint32_t count) except -1:
        """Lend what a request has in memory of others, and name it in the request's tensors.

        Returns False for arrays on devices. Calls Python's code.
        """
        cdef uint32_t number = 0
        for output, lease in request.targets.items():
            self.targets.append([index, output, *self._blocks.lend_target(lease)])
        for array in <list?>request.arrays:
            if number == count or not isinstance(array, _ndarray):
                return False
            found = self._blocks.lend(array)
            if found is not None:
                # The first block is for copies.
                self.lent.append(found[0])
                tensors[number].block, tensors[number].offset = len(self.lent), found[1]
            number += 1
        return True


cdef class LaneEnd:
    cpdef bint put(self, requests) except -1:
        return False

    cpdef bint wait(self) except -1:
        return False

    cpdef bint wait_alone(self) except -1:
        return False

    cpdef wait_until(self, int64_t deadline_ns, bint is_alone):
        return None

    cpdef take(self, requests):
        return None


cdef class RuntimePort(LaneEnd):
    """The runtime's end of a work channel."""

    cdef object _conversation, _inbox, _fileno, _released, _given_back, _release
    cdef LentBlocks _blocks
    cdef ExecutingBatch _replies
    cdef dict _regions
    cdef public object batch, core, is_plain
    cdef public int64_t look_ns, rests
    cdef list _names
    cdef vector[string] _native_names
    cdef AnswerLayout* _layout
    cdef AnswerLayout* _apart
    cdef PlainAnswer _answer
    cdef vector[uint32_t] _counts
    cdef vector[PlacedTensor] _tensors
    cdef Writer _message, _packed, _room
    cdef object _apart_region
    cdef Block _apart_block
    # The channel if it is in memory, else None.
    cdef SlotChannel _slots

    def __cinit__(self):
        self._layout = self._apart = NULL

    def __init__(self, conversation, blocks, replies, released, given_back, regions):
        self._conversation = conversation
        self._inbox, self._fileno = conversation.channel.inbox, conversation.channel.descriptor
        self._blocks, self._replies, self._released, self._regions = blocks, replies, released, regions
        self._given_back, self.link = given_back, None
        self._release = released.append
        self.batch, self.core, self.is_plain = 0, kNoCore, False
        self.look_ns = self.rests = 0

    def __dealloc__(self):
        del self._layout
        del self._apart

    def use(self, slots):
        self._inbox, self._fileno, self._slots = slots.inbox, slots.descriptor, slots

    def serve(self, names, look_ns):
        self._names, self.look_ns = list(names), look_ns
        self._native_names.clear()
        for name in names:
            self._native_names.push_back(name.encode())
        del self._layout
        del self._apart
        self._layout = self._apart = NULL
        self._layout = new AnswerLayout(self._native_names)
        self._apart = new AnswerLayout(self._native_names)
        self.is_plain = True

    # Down

    cpdef bint put(self, requests) except -1:
        """Place the inputs of a batch and send it. Returns False, having done nothing, if Python has to do it."""
        if not self.is_plain or self._layout == NULL or type(requests) is not list or len(self._given_back):
            return False
        if _EXECUTE not in self._conversation.turn[0]:
            return False
        cdef uint64_t size
        cdef list taken = []
        cdef Elsewhere elsewhere = None
        try:
            for each in requests:
                if (<RequestBase?>each).has_views:
                    # Python's code lends, in which a handler could raise anywhere.
                    if self._is_interruptible():
                        return False
                    elsewhere = Elsewhere(self._blocks)
                    break
            if not self._place(requests, elsewhere, &size):
                if elsewhere is not None:
                    self._undo(taken)
                return False
        except Exception:
            # Python's form meets the same. No signal handler runs here.
            self._undo(taken)
            return False
        try:
            block = self._take_block(size) if size > 0 else None
        except BaseException as error:
            self._undo(taken)
            if isinstance(error, MoonpoolError):
                return False  # Python's form meets the same
            raise
        try:
            if block is not None and not self._copy(requests, block) or not self._take_released(taken):
                self._undo(taken)
                return False
            batch = self.batch + 1
            if not self._write(batch, requests, taken, block, size, elsewhere):
                self._undo(taken)
                return False
            self.batch = batch
            # Its responses may come on another channel at once.
            self._replies.executing = (batch, requests)
            if not self._send_message():
                self._undo(taken)
                return False
        except Exception:
            # Python's form meets the same.
            self._undo(taken)
            return False
        except BaseException:
            self._undo(taken)
            raise
        self._conversation.turn = self._conversation.after[_EXECUTE]
        _counts.put += 1
        _counts.copied_bytes += size
        return True

    cdef bint _place(self, list requests, Elsewhere elsewhere, uint64_t* size) except -1:
        """Say where each tensor of the batch lies, and how large the block for those is that are copied.

        Returns False if Python has to do it.
        """
        cdef RequestBase request
        cdef Shapes shapes
        cdef PlacedTensor tensor
        cdef Row row
        cdef size_t i
        self._counts.clear()
        self._tensors.clear()
        tensor.block = tensor.offset = 0
        for each in requests:
            request = <RequestBase?>each
            shapes = <Shapes?>request.shapes
            if <size_t>len(<list?>request.arrays) != shapes._rows.size():
                return False
            self._counts.push_back(<uint32_t>shapes._rows.size())
            for i in range(shapes._rows.size()):
                row = shapes._rows[i]
                tensor.index, tensor.datatype, tensor.size = row.number, row.datatype, row.size
                tensor.shape, tensor.dims = shapes._dims.data() + row.first_dim, row.dims
                self._tensors.push_back(tensor)
        if elsewhere is not None and not self._lend(requests, elsewhere):
            return False
        return place(self._counts, self._tensors, size) and (size[0] > 0 or elsewhere is not None)

    cdef bint _is_interruptible(self) except -1:
        return get_ident() == self._blocks.interruptible[0]

    cdef bint _lend(self, list requests, Elsewhere elsewhere) except -1:
        cdef uint64_t index = 0, first = 0
        cdef uint32_t count
        for each in requests:
            count = self._counts[index]
            if (<RequestBase>each).has_views and not elsewhere.lend(each, index, self._tensors.data() + first, count):
                return False
            first += count
            index += 1
        return True

    cdef _take_block(self, uint64_t size):
        """Borrow the block that a batch of this size had before, or have Python allocate one."""
        # In one step: other threads take blocks for what the stub keeps.
        block = self._blocks.spares.pop(block_bytes(size), None)
        if block is None:
            return self._blocks.allocate(size)
        self._blocks.lent.append(((block.region.id, block.offset), block))
        return block

    cdef bint _copy(self, list requests, block) except -1:
        """Copy the inputs into the block. Returns False for arrays that are not as they were checked."""
        cdef Py_buffer memory
        buffer = block.region.buffer
        if buffer is None:
            return False
        cdef int64_t offset = block.offset, room = block.size_bytes
        PyObject_GetBuffer(buffer, &memory, PyBUF_WRITABLE)
        try:
            if offset < 0 or room < 0 or offset > memory.len - room:
                return False
            return self._copy_to(requests, <char*>memory.buf + offset, room)
        finally:
            PyBuffer_Release(&memory)

    cdef bint _copy_to(self, list requests, char* to, int64_t room) except -1:
        cdef size_t at = 0, last = self._last_long()
        cdef PlacedTensor tensor
        cdef Py_buffer source
        cdef RequestBase request
        for each in requests:
            request = <RequestBase>each
            for array in <list?>request.arrays:
                tensor = self._tensors[at]
                at += 1
                if tensor.block > 0:
                    continue
                if tensor.offset > <uint64_t>room or tensor.size > <uint64_t>room - tensor.offset:
                    return False
                if _is_as_checked(array, &tensor) and tensor.size < LONG_COPY_BYTES:
                    memcpy(to + tensor.offset, fields(array).data, tensor.size)
                    continue
                if not is_array(array) or not (fields(array).flags & kContiguous):
                    return False
                PyObject_GetBuffer(array, &source, PyBUF_SIMPLE)
                if <uint64_t>source.len != tensor.size:
                    PyBuffer_Release(&source)
                    return False
                if tensor.size < LONG_COPY_BYTES:
                    memcpy(to + tensor.offset, source.buf, tensor.size)
                elif at == last and self._slots is not None:
                    try:
                        self._slots.copy_and_announce(to + tensor.offset, <const char*>source.buf, tensor.size)
                    finally:
                        PyBuffer_Release(&source)
                    continue
                else:
                    with nogil:
                        copy(to + tensor.offset, <const char*>source.buf, tensor.size)
                PyBuffer_Release(&source)
        return True

    cdef size_t _last_long(self) noexcept:
        """Return the number, from 1 on, of the last tensor whose copy takes long; 0 if there is none."""
        cdef size_t at = self._tensors.size()
        while at > 0 and (self._tensors[at - 1].block > 0 or self._tensors[at - 1].size < LONG_COPY_BYTES):
            at -= 1
        return at

    cdef bint _take_released(self, list taken) except -1:
        """Take the places that callers have dropped. They must not be lost."""
        cdef Py_ssize_t left = len(self._released)
        if left > MOST_RELEASED:
            return False
        popleft = self._released.popleft
        while left > 0:
            left -= 1
            try:
                taken.append(popleft())
            except IndexError:  # another thread took the last one
                return True
        return True

    cdef bint _write(self, batch, list requests, list taken, block, uint64_t size, Elsewhere elsewhere) except -1:
        """Write EXECUTE. Returns False if it does not fit into a packet."""
        cdef RequestBase request
        cdef bint has_details = False
        self._packed.clear()
        write_layout(self._packed, self._counts, self._tensors)
        cdef Writer* message = &self._message
        message.clear()
        message.array(8)
        message.uint(kExecute)
        message.uint(batch)
        message.uint(current_core())
        message.array(len(taken))
        for region, offset in taken:
            message.array(2)
            message.uint(region)
            message.uint(offset)
        message.array(1 if elsewhere is None else 1 + len(elsewhere.lent))
        message.array(3)
        # An empty block in a region that exists, if nothing is copied.
        message.uint(self._blocks.first.id if block is None else block.region.id)
        message.uint(0 if block is None else block.offset)
        message.uint(size)
        if elsewhere is not None:
            self._write_rows(elsewhere.lent)
        message.raw(self._packed.bytes())
        for each in requests:
            if (<RequestBase>each).details is not None:
                has_details = True
        if not has_details:
            message.nil()
        else:
            message.array(len(requests))
            for each in requests:
                request = <RequestBase>each
                if request.details is None:
                    message.nil()
                elif not write_details(message, request.details):
                    return False
        if elsewhere is None or not elsewhere.targets:
            message.nil()
        else:
            message.array(len(elsewhere.targets))
            self._write_rows(elsewhere.targets)
        return message.bytes().size() <= kMaxPacketBytes

    cdef int _write_rows(self, list rows) except -1:
        for row in rows:
            self._message.array(len(row))
            for number in row:
                self._message.uint(number)
        return 0

    cdef int _undo(self, list taken) except -1:
        """Make it as if nothing had happened. Keeps the error that is being handled."""
        self._released.extend(taken)
        self._blocks.end_batch(())
        return 0

    cdef bint _send_message(self) except -1:
        """Send EXECUTE. Returns False or raises if that fails: nothing was sent."""
        cdef string_view bytes_of = self._message.bytes()
        if self._slots is None:
            return c_send(self._fileno(), bytes_of.data(), bytes_of.size(),
                          MSG_DONTWAIT | MSG_NOSIGNAL) == <ssize_t>bytes_of.size()
        self._slots.put(bytes_of)
        return True

    # Waiting

    cpdef bint wait(self) except -1:
        """Wait for a packet and put it into the channel's inbox.

        Returns False, having done nothing, if Python has to do it.
        """
        return self._wait(0, NULL, True)

    cpdef bint wait_alone(self) except -1:
        """Do what `wait` does for a caller who alone waits.

        Looks for the answer for a moment first, where that has helped lately.
        """
        return self._wait_or_look(True)

    cpdef wait_until(self, int64_t deadline_ns, bint is_alone):
        """Do what `wait` does, and `wait_alone` if it `is_alone`, until a time of `time.monotonic_ns`.

        Returns False at that time, and None if Python has to do it.
        """
        if self._slots is None:
            return None
        if not self._slots.wait(deadline_ns, self.look_ns if is_alone else 0):
            return False
        _counts.wait += 1
        return True

    def look(self):
        """Look for the answer for a moment, where that has helped lately. Returns True if it is there."""
        return self._wait_or_look(False)

    cdef bint _wait_or_look(self, bint sleeps) except -1:
        if self._slots is not None:
            if not sleeps:
                return self._slots.look(self.look_ns)
            self._slots.wait(0, self.look_ns)
            _counts.wait += 1
            return True
        cdef uint64_t here = current_core(), its = self.core
        cdef bint is_there = False, done = True
        if self.look_ns <= 0 or its == kNoCore or here == kNoCore or its == here:
            return sleeps and self._wait(0, &is_there, True)
        if sleeps or self.rests == 0:
            done = self._wait(0 if self.rests > 0 else self.look_ns, &is_there, sleeps)
        if done:
            self.rests = self.rests - 1 if self.rests > 0 else 0 if is_there else RESTS
        return done if sleeps else is_there

    cdef bint _wait(self, int64_t look_ns, bint* is_there, bint sleeps) except -1:
        inbox = self._inbox
        if self._slots is not None:
            self._slots.wait()
            _counts.wait += 1
            return True
        if len(inbox):
            if is_there != NULL:
                is_there[0] = True
            return True
        cdef char* room = <char*>malloc(ROOM)
        if room == NULL:
            return False
        cdef ssize_t size
        cdef int fd, error
        cdef int64_t end_ns
        try:
            while True:
                if look_ns == 0:
                    # A signal that has come already would not interrupt the call below.
                    PyErr_CheckSignals()
                # Each time: another thread may have closed the channel meanwhile, and its number may be another stub's.
                fd = self._fileno()
                if fd < 0:
                    return False
                if look_ns == 0:
                    with nogil:
                        size = c_recv(fd, room, ROOM, 0)
                        error = errno
                else:
                    end_ns = monotonic_ns() + look_ns
                    with nogil:
                        while not has_packet(fd) and monotonic_ns() < end_ns:
                            pass
                    size = c_recv(self._fileno(), room, ROOM, MSG_DONTWAIT)
                    error = errno
                    if size < 0 and error == EAGAIN:
                        error = EINTR
                if size >= 0:
                    # No signal handler runs before the packet is in the inbox.
                    _keep(inbox, room, size)
                    _counts.wait += 1
                    if is_there != NULL:
                        is_there[0] = look_ns != 0
                    return True
                if error != EINTR:
                    return False  # Python's form meets the same, or what comes after it
                if not sleeps:
                    return True
                look_ns = 0
        finally:
            free(room)

    # Up

    cpdef take(self, requests):
        """Read the answer, and return the responses.

        Returns None, and leaves the packet in the inbox, if Python has to do it.
        """
        if not self.is_plain or self._layout == NULL or type(requests) is not list:
            return None
        if _ANSWER not in self._conversation.turn[1]:
            return None
        for each in requests:
            if (<RequestBase?>each).allocator is not None:
                return None
        inbox = self._inbox
        if not len(inbox) and not self._receive(inbox):
            return None
        cdef bytes packet = inbox[0]
        cdef size_t size = PyBytes_Size(packet)
        if size == 0 or size > kMaxPacketBytes:
            return None
        cdef string_view said = string_view(PyBytes_AsString(packet), size)
        if not self._answer.read(said, self.batch, len(requests), self._layout[0]):
            return None
        if not self._has_descrs(self._layout):
            return None
        cdef list opened = self._open()
        if opened is None:
            return None
        # From here on nothing is left to Python: leases give back what they are on when they end.
        inbox.popleft()
        cdef list leases = [self._lease(opened[i], self._answer.blocks[i]) for i in range(len(opened))]
        cdef list answers = [self._response(self._layout, i, requests[i], leases) for i in range(len(requests))]
        self._conversation.turn = self._conversation.after[_ANSWER]
        self.core = self._answer.core
        cdef ExecutingBatch replies = self._replies
        # A thread that holds the lock may be about to note that a request ended.
        if replies.ended or replies.lock.locked():
            replies.answered(None)
        else:
            replies.executing = _no_batch
        self._end()
        _counts.take += 1
        return answers

    cdef bint _receive(self, inbox) except -1:
        """Take a packet from the channel, where it is already."""
        if self._slots is not None:
            self._slots.wait(AT_ONCE)
            return len(inbox) > 0
        cdef char* room = <char*>malloc(ROOM)
        if room == NULL:
            return False
        cdef ssize_t size = -1
        cdef int fd = self._fileno()
        try:
            if fd >= 0:
                size = c_recv(fd, room, ROOM, MSG_DONTWAIT)
            if size < 0:
                return False  # Python's form meets the same
            # An empty one is the end of the peer, or an empty packet, which would not come a second time.
            _keep(inbox, room, size)
            return True
        finally:
            free(room)

    cdef list _open(self):
        """Return region and buffer of each block, and a lease on one that was lent for the batch.

        Returns None if one lies elsewhere.
        """
        cdef list opened = []
        cdef Block block
        for i in range(<Py_ssize_t>self._answer.blocks.size()):
            block = self._answer.blocks[i]
            region = self._region_of(block)
            # Its buffer now: where Python's code runs, another thread may close it.
            found = self._lent(block) if region is None else (region, region.buffer)
            if found is None:
                return None
            opened.append(found)
        return opened

    cdef _lent(self, Block block):
        """Return a lease on a block that was lent for the batch, or None if it lies elsewhere. Calls Python's code."""
        if block.region in self._regions or self._is_interruptible():
            return None
        try:
            lease = self._blocks.open(block.region, block.offset, block.size)
        except MoonpoolError:
            return None  # Python's form meets the same
        return lease if type(lease) is Lease else None

    cdef _region_of(self, Block block):
        """Return the region for answers that a block lies in, or None if it lies elsewhere."""
        region = self._regions.get(block.region)
        # Neither number has more than 63 bits.
        if region is None or block.offset + block.size > <uint64_t>region.size_bytes or region.buffer is None:
            return None
        return region

    cdef _lease(self, opened, Block block):
        if type(opened) is Lease:
            return opened
        region, buffer = opened
        return lease_on(region, buffer, block, self._release)

    cdef bint _has_descrs(self, AnswerLayout* layout) except -1:
        """Return True if all datatypes have a dtype here. That of BF16 is looked up when Python needs it first."""
        cdef size_t i
        for i in range(layout.outputs().size()):
            datatype = layout.outputs()[i].datatype
            if _descrs[datatype] is None and datatype != _BYTES:
                if datatype not in DTYPES:
                    return False
                _descrs[datatype] = DTYPES[datatype]
        return True

    cdef _response(self, AnswerLayout* layout, size_t index, RequestBase request, list leases):
        cdef dict outputs = {}
        cdef OutputLayout output
        cdef size_t i
        cdef int64_t size
        cdef char* at
        cdef bint wants_wire = request.wants_wire is True
        for i in range(layout.first(index), layout.first(index + 1)):
            output = layout.outputs()[i]
            lease = leases[output.block]
            at = fields(lease).data + output.offset
            if wants_wire or <int>output.datatype == _BYTES:
                size = output.size
                raw = view(_ndarray, _u1, 1, &size, at, 1, lease)
                if wants_wire:
                    made_output = tuple.__new__(_wire_tensor_type, (output.datatype, _shape_of(layout, &output), raw))
                else:
                    made_output = None
                    # Python lets other threads run meanwhile.
                    if output.size < LONG_COPY_BYTES:
                        made_output = strings(raw, _shape_of(layout, &output), output.elements)
                    if made_output is None:
                        made_output = _decoded(self._names[output.index], raw, _shape_of(layout, &output))
            else:
                made_output = view(_ndarray, _descrs[output.datatype], output.dims, layout.shape(output), at,
                                   kItemBytes[output.datatype], lease)
            outputs[self._names[output.index]] = made_output
        response = _response_type.__new__(_response_type)
        response.outputs, response.parameters = outputs, {}
        response.request_id = "" if request.details is None else request.details.request_id
        return response

    cdef int _end(self) except -1:
        """Put the block of the batch aside, or have Python end it."""
        cdef LentBlocks blocks = self._blocks
        cdef list lent = blocks.lent
        # A thread that holds the lock may be about to hold this block, too.
        if len(lent) == 1 and not blocks.targets and not blocks.lock.locked():
            block = lent[0][1]
            if type(block) is _Block and block.holds == 1 and block.region is blocks.first:
                if blocks.spares.setdefault(block.size_bytes, block) is block:
                    lent.clear()
                    return 0
        blocks.end_batch(())
        return 0

    # A response that comes apart from the answer

    def open_apart(self, list blocks, packed):
        """Read a response that has nothing but outputs in one block.

        Returns False, having done nothing, if Python has to do it.
        """
        cdef Block block
        if not self.is_plain or self._apart == NULL or len(blocks) != 1 or type(packed) is not bytes:
            return False
        # Room for more would stay.
        if <uint64_t>len(packed) > kMaxPacketBytes:
            return False
        block.region, block.offset, block.size = blocks[0]
        cdef string_view said = string_view(PyBytes_AsString(packed), PyBytes_Size(packed))
        if not read_apart(self._room, block, said, self._apart[0]):
            return False
        region = self._region_of(block)
        if region is None:
            return False
        if not self._has_descrs(self._apart):
            return False
        self._apart_region, self._apart_block = region, block
        return True

    def apart(self, request):
        """Return the response that was opened, to this request."""
        # Not earlier: a lease gives back its block when it ends, and Python may have to make another one there.
        cdef list leases = [self._lease((self._apart_region, self._apart_region.buffer), self._apart_block)]
        _counts.apart += 1
        return self._response(self._apart, 0, request, leases)


def packed_details(details):
    """Return the details of a request as EXECUTE has them, None if they do not fit into a packet. For tests."""
    cdef Writer message
    if not write_details(&message, details):
        return None
    return PyBytes_FromStringAndSize(message.bytes().data(), message.bytes().size())


cdef bint write_details(Writer* message, details) except -1:
    """Write the details of a request, with the bytes of `pack`. Returns False if they do not fit into a packet."""
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t at = 0
    message.array(len(details))
    for field in details:
        if type(field) is dict:
            message.map(len(<dict>field))
            at = 0
            while PyDict_Next(field, &at, &key, &value):
                if not (write_value(message, <object>key) and write_value(message, <object>value)):
                    return False
        elif not write_value(message, field):
            return False
    return True


cdef bint write_value(Writer* message, value) except -1:
    cdef const char* at
    cdef Py_ssize_t size
    cdef int64_t number
    cdef int overflow
    if value is None:
        message.nil()
    elif type(value) is str:
        at = PyUnicode_AsUTF8AndSize(value, &size)
        # Room for more would stay.
        if message.bytes().size() + size > kMaxPacketBytes:
            return False
        message.text(string_view(at, size))
    elif type(value) is bool:
        message.flag(value is True)
    elif type(value) is float:
        message.real(value)
    else:
        if type(value) is int:
            number = PyLong_AsLongLongAndOverflow(value, &overflow)
            if not overflow:
                message.integer(number)
                return True
        row = pack(value)
        if message.bytes().size() + PyBytes_Size(row) > kMaxPacketBytes:
            return False
        message.values(string_view(PyBytes_AsString(row), PyBytes_Size(row)))
    return True


cdef int _keep(inbox, const char* room, ssize_t size) except -1:
    """Put a packet into the inbox.

    Without memory for it, the peer counts as gone: nobody would wait for the packet any more.
    """
    try:
        inbox.append(PyBytes_FromStringAndSize(room, size))
    except MemoryError:
        inbox.append(b"")
    return 0


cdef _decoded(name, raw, tuple shape):
    """Return the strings of an output as Python reads them, or say as it does what is wrong."""
    try:
        return decode_bytes(raw, shape)
    except BadTensor as bad:
        raise RemoteProtocolError(f"output {name!r}: {bad}") from bad


cdef bint _is_as_checked(array, PlacedTensor* tensor) except -1:
    """Return True if an array has the bytes that it had when it was checked, in one piece."""
    if not is_array(array):
        return False
    cdef Array* seen = fields(array)
    descr = _descrs[tensor.datatype]
    if descr is None:
        descr = _u1  # strings, encoded
    if not (seen.flags & kContiguous) or <PyObject*>seen.descr is not <PyObject*>descr:
        return False
    return bytes_of(array, 1 if <int>tensor.datatype == _BYTES else kItemBytes[tensor.datatype]) == tensor.size


cdef tuple _shape_of(AnswerLayout* layout, const OutputLayout* output):
    cdef const int64_t* dims = layout.shape(output[0])
    return tuple([dims[k] for k in range(output.dims)])
