# distutils: language = c++
# cython: language_level=3, binding=False, annotation_typing=False
# cython: boundscheck=True, wraparound=True, nonecheck=True, overflowcheck=True, auto_pickle=False
"""The compiled form of `port.py`, which says what everything here is for, and of `stub/attributes.py`.

What comes from the runtime is checked by the table of which Python's check is made, before anything is used. A block
must lie within its region, and a tensor within its block. What comes from the model may have any type: only objects of
the exact classes are looked into, and what was seen of an array is looked at once more right before it is copied.

No signal handler runs inside a method, except where it calls Python's code: at hooks that a comment names, and where
an object ends. So objects are made first, and what others see is changed after that. While the interpreter's lock is
given up, no frame has anything to clean up.

Looking. If the runtime sent its packet from another core, the next one may come sooner than the kernel wakes this
thread. So `receive` looks for the packet for a while before it blocks, but only if the last one came within that time
and the time of two wake-ups, which looking saves; and never on the sender's core, where the sender could not run
meanwhile. A signal that came during that time is handled before the thread blocks.
"""

import sys

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_DECREF
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.vector cimport vector

from moonpool.ipc.port._port cimport (
    MSG_DONTWAIT, MSG_NOSIGNAL, Array, Block, OutputLayout, Writer, add_sources, block_bytes, bytes_of, c_recv, c_send,
    copy, current_core, fields, find_table, flag, is_array, kAnswer, kContiguous, kItemBytes, kMaxPacketBytes, kNoCore,
    monotonic_ns, string_view, view,
)

import numpy as np

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import pack, unpacked_details
from moonpool.ipc.memory import ALIGNMENT, Lease
from moonpool.ipc.messages import ANSWERED, MAX_DIMS, NO_CORE, NO_DETAILS, NO_DEVICE, Kind
from moonpool.ipc.region import SharedRegion
from moonpool.ipc.tensors import BF16, BYTES, DTYPES

cdef extern from "port.h" namespace "moonpool":
    ctypedef struct Place "moonpool::wire::Place":
        uint64_t region, offset
    ctypedef struct DetailsRow "moonpool::PlainBatch::Details":
        string_view packed
        flag is_rare
    ctypedef struct TargetRow "moonpool::wire::Target":
        uint64_t request, output, region, offset, size
    cdef cppclass PlainBatch:
        flag read(string_view packet, size_t names)
        size_t requests()
        const int64_t* shape(const OutputLayout&)
        uint64_t batch, core
        vector[Place] released
        vector[Block] blocks
        vector[OutputLayout] inputs
        vector[size_t] firsts
        vector[DetailsRow] details
        vector[TargetRow] targets

cdef extern from "answer.h" namespace "moonpool":
    flag check_tensor(const int64_t*, uint64_t, uint64_t, uint64_t, uint64_t*, string*)

cdef extern from "place.h" namespace "moonpool":
    void write_tensor(Writer&, const uint64_t&, uint64_t, const int64_t*, uint64_t, uint64_t, uint64_t,
                      uint64_t) except +

cdef extern from "structmember.h":
    ctypedef struct PyMemberDef:
        const char* name
        int type, flags
        Py_ssize_t offset
    const int T_OBJECT_EX

cdef extern from *:
    # Of Python's limited API, where Cython has macros, or nothing.
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*) except NULL
    object PyDescr_NewMember(PyTypeObject*, PyMemberDef*)
    ctypedef object (*New "newfunc")(PyTypeObject*, object, PyObject*)
    void* PyType_GetSlot(PyTypeObject*, int)
    const int Py_tp_new
    int64_t PyLong_AsLongLongAndOverflow(PyObject*, int*) noexcept
    PyObject* PyTuple_GetItem(object, Py_ssize_t) except NULL

add_sources(sys.modules[__name__])
find_table(np.ones((2, 3), np.float32))

# As a global, each would be looked up by its name.
cdef object _ndarray = np.ndarray, _lease = Lease, _shared_region = SharedRegion
cdef object _u1 = np.dtype(np.uint8)
# By datatype; the bytes for those that are viewed so.
cdef list _descrs = [DTYPES[code] if code in DTYPES and code < BYTES else _u1 for code in range(15)]
cdef list _datatypes = list(range(15))
cdef PyObject* _descr_of[15]
for code in range(15):
    _descr_of[code] = <PyObject*>_descrs[code]
cdef int _BYTES = BYTES, _BF16 = BF16
cdef size_t _MAX_DIMS = MAX_DIMS
cdef uint64_t _ALIGNMENT = ALIGNMENT
cdef object _EXECUTE = int(Kind.EXECUTE)
cdef object _ANSWER = int(Kind.ANSWER)
cdef object _NO_CORE = NO_CORE, _NO_DEVICE = NO_DEVICE, _ANSWERED = ANSWERED, _NO_DETAILS = NO_DETAILS
cdef enum:
    # As in `Channel`: a longer packet is recognized by one byte more.
    ROOM = 32769
    # A copy from this size on takes so long that others should have the interpreter meanwhile.
    LONG_COPY_BYTES = 262144
    # More than a row of RESPONSES has beside the description of its outputs.
    ROW_ROOM = 96
    # A wait takes so much more than the peer's work if both sides sleep: the time of two wake-ups.
    WAKE_UPS_NS = 100000


# For tests: a method that always declines would pass all others.
cdef struct Counts:
    uint64_t open, stacked, place, take, give, apart

cdef Counts _counts


def counts():
    """Return how often each method did its work."""
    return dict(_counts)


# How many objects are being made whose attributes the port sets. A garbage collection may make others meanwhile.
cdef int _filled = 0


cdef int unset(PyObject* made, size_t count) except -1:
    """Let a new object have no attributes, as if it had slots: Cython sets each to None."""
    cdef PyObject** attributes = <PyObject**>(<char*>made + sizeof(PyObject))
    cdef size_t i
    if _filled == 0:
        for i in range(count):
            Py_DECREF(<object>attributes[i])
            attributes[i] = NULL
    return 0


cdef class TensorBase:
    def __cinit__(self):
        unset(<PyObject*>self, 6)


cdef class InferenceResponseBase:
    def __cinit__(self):
        unset(<PyObject*>self, 3)


cdef class InferenceRequestBase:
    def __cinit__(self):
        unset(<PyObject*>self, 12)


cdef class BatchBase:
    pass


cdef class AnswerBase:
    pass


cdef int add_members(kind, tuple names) except -1:
    """Let Python's code reach the attributes of a class with this base, which has these and no others, in that order.

    They are members, as `__slots__` would make them. Python's interpreter reads members at their places, and would
    call a function for each `public` attribute of Cython's.
    """
    cdef PyMemberDef* members = <PyMemberDef*>calloc(len(names), sizeof(PyMemberDef))
    if members == NULL:
        raise MemoryError
    if kind.__basicsize__ != sizeof(PyObject) + len(names) * sizeof(PyObject*):
        raise ImportError(f"{kind.__name__} has other attributes than {', '.join(names)}")
    cdef size_t i
    for i, name in enumerate(names):
        members[i].name, members[i].type = PyUnicode_AsUTF8AndSize(name, NULL), T_OBJECT_EX
        members[i].offset = sizeof(PyObject) + i * sizeof(PyObject*)
        setattr(kind, name, PyDescr_NewMember(<PyTypeObject*>kind, &members[i]))
    # By which Python copies an object.
    kind.__slots__ = names
    return 0


add_members(TensorBase, ("_array", "_datatype", "_name", "_shape", "_strings", "_wire"))
add_members(InferenceResponseBase, ("_error", "_outputs", "_parameters"))
add_members(InferenceRequestBase, (
    "_cancelled", "_inputs", "_model_name", "_model_version", "_origin", "_preferred_memory", "_release_flags",
    "_reply", "_requested_output_names", "_row", "_sender", "_trace",
))
add_members(BatchBase, ("has_copies", "kept", "lent", "places", "targets"))
add_members(AnswerBase, ("blocks", "layouts", "remarks", "states"))

# What `TensorBase.__new__` and the others call, in a third of their time.
cdef New _new_tensor = <New>PyType_GetSlot(<PyTypeObject*>TensorBase, Py_tp_new)
cdef New _new_response = <New>PyType_GetSlot(<PyTypeObject*>InferenceResponseBase, Py_tp_new)
cdef New _new_request = <New>PyType_GetSlot(<PyTypeObject*>InferenceRequestBase, Py_tp_new)
cdef tuple _nothing = ()


cdef make(New new, kind):
    """Make an object, each attribute of which is None."""
    global _filled
    _filled += 1
    try:
        return new(<PyTypeObject*>kind, _nothing, NULL)
    finally:
        _filled -= 1


# This module lies below those of these classes.
cdef object _tensor, _request, _response, _untraced, _lent_region, _target
cdef uint64_t _PASSED_BYTES


def use(tensor, request, response, untraced, passed_bytes, *, lent_region, target):
    """Make objects of these classes from now on, and look into them alone. For the module that has them.

    An array in a lease is copied if it has fewer bytes than `passed_bytes`.
    """
    global _tensor, _request, _response, _untraced, _PASSED_BYTES, _lent_region, _target
    for kind, base in (tensor, TensorBase), (request, InferenceRequestBase), (response, InferenceResponseBase):
        if not issubclass(kind, base):
            raise TypeError(f"{kind} has not the attributes of {base}")
    _tensor, _request, _response, _untraced, _PASSED_BYTES = tensor, request, response, untraced, passed_bytes
    _lent_region, _target = lent_region, target


cdef bint is_small_int(PyObject* found, int64_t* number) noexcept:
    """Get an int that fits into 64 bits. Returns False for anything else."""
    cdef int overflow = 0
    if found == NULL or type(<object>found) is not int:
        return False
    number[0] = PyLong_AsLongLongAndOverflow(found, &overflow)
    return overflow == 0


# One of a subclass may mean something else by the same attributes.

cdef bint is_tensor(found) noexcept:
    return type(found) is _tensor


cdef bint is_request(found) noexcept:
    return type(found) is _request


cdef class OwnBlocks:
    """Blocks in the stub's own regions, for messages."""

    def __init__(self, regions):
        self._regions, self._returned, self._take_returned = regions, regions.returned, regions.returned.popleft
        self._acquire, self._release = regions._turn.acquire, regions._turn.release
        self._arena, self._spares = regions.arena, regions.spares

    cdef allocate(self, uint64_t size):
        """Do what `Regions.allocate` does. Mostly that is to take a block of an earlier answer that came back.

        That is done here if no other thread has the arena at this moment. Otherwise it is a hook: Python's code waits
        for memory.
        """
        cdef list taken
        block = self.take_spare(size)
        if block is not None:
            return block
        taken = []
        try:
            return self._regions.allocate(size, _NO_DEVICE, taken)
        except BaseException:
            if taken:
                self.give_back(taken[0])
            raise

    cdef take_spare(self, uint64_t size):
        """Return a block of an earlier answer that came back, or None if Python has to do it."""
        block = None
        if self._acquire(False) is True:
            try:
                block = self._spare(block_bytes(size))
            except BaseException:
                pass  # Python's form meets the same
            self._release()
        return block

    cdef _spare(self, uint64_t size):
        """Put the blocks aside that came back, and return the last one of this size.

        Returns None if Python has to do it. Needs the turn.
        """
        cdef Py_ssize_t left = len(self._returned)
        cdef int64_t region, holds, size_bytes
        cdef list aside
        if self._live is None and not self._find_first():
            return None
        while left > 0:
            left -= 1
            region, offset = <tuple?>self._returned[0]
            block = self._live.get(offset) if region == self._first else None
            holds, size_bytes = (0, 0) if block is None else (block.holds, block.size_bytes)
            if holds != 1:
                return None
            if left == 0 and <uint64_t>size_bytes == size:
                # It would be put aside, and be the last one there.
                self._take_returned()
                return block
            self._spares.setdefault(size_bytes, []).append(block)
            block.holds = 0
            self._take_returned()
        aside = self._spares.get(size)
        if not aside:
            return None
        block = aside.pop()
        block.holds = 1
        return block

    cdef bint _find_first(self) except -1:
        """Find the first region, which stays. Returns False if it has not come yet."""
        for number, extents in self._arena._extents.items():
            self._first, self._region, self._live = number, extents.region, extents.live
            return True
        return False

    cdef int give_back(self, block) except -1:
        """Give back a block that was allocated for a message that is not sent."""
        self._returned.append((block.region.id, block.offset))
        return 0

    cdef Block fill(self, block, list arrays, const vector[Output]& placed, list targets, uint64_t size,
                    SlotChannel slots, size_t announced) except *:
        """Copy tensors into a block, but those that have a target, and return its place.

        The next packet of `slots`, if there are any, is about them, and the tensor of the number `announced`, from 1
        on, is the last large one. Raises `ValueError` for an array that is another one now.
        """
        cdef Py_buffer memory
        cdef Block place
        cdef int64_t start = block.offset
        cdef size_t i
        region = block.region
        place.region = self._first if region is self._region else region.id
        place.offset, place.size = start, size
        PyObject_GetBuffer(region.buffer, &memory, PyBUF_WRITABLE)
        try:
            # The tables are this process's own, which the model may have changed.
            if start < 0 or start > memory.len or size > <uint64_t>(memory.len - start):
                raise ValueError("a block is not within its region")
            for i in range(placed.size()):
                if targets is None or targets[i] is None:
                    _copy_to(<char*>memory.buf + start + placed[i].offset, arrays[i], &placed[i],
                             slots if i + 1 == announced else None)
        finally:
            PyBuffer_Release(&memory)
        return place


cdef int _copy_to(char* to, array, const Output* output, SlotChannel slots) except -1:
    """Copy a tensor, and let the peer wake up meanwhile if there are `slots`.

    Raises `ValueError` for an array that is another one now.
    """
    # Also after a long copy, during which other threads of the model ran.
    if not _is_flat(array, output.datatype) or _size_of(array, output.datatype) != output.whole:
        raise ValueError("an array was changed while it was sent")
    cdef const char* data = fields(array).data + output.source
    cdef size_t length = output.size
    if slots is not None:
        slots.copy_and_announce(to, data, length)
    elif length >= LONG_COPY_BYTES:
        with nogil:
            copy(to, data, length)
    else:
        memcpy(to, data, length)
    return 0


cdef int _deliver(target, array, const Output* output, SlotChannel slots) except -1:
    """Copy a tensor to a client's memory. Raises as `_copy_to`, and `RemoteProtocolError` if it cannot be mapped."""
    cdef Py_buffer memory
    region, offset, _ = target
    # A hook, once for each region.
    outputs = region.open_outputs() if region.outputs is None else region.outputs
    cdef int64_t start = offset
    PyObject_GetBuffer(outputs, &memory, PyBUF_WRITABLE)
    try:
        if start < 0 or start > memory.len or output.size > <uint64_t>(memory.len - start):
            raise ValueError("a place is not within its region")
        _copy_to(<char*>memory.buf + start, array, output, slots)
    finally:
        PyBuffer_Release(&memory)
    return 0


cdef array_of(TensorBase tensor, Output* output, vector[int64_t]* dims):
    """Describe a tensor of the model's, add its dimensions, and return its array.

    Returns None if it is not just copied.
    """
    cdef PyObject* array = <PyObject*>tensor._array
    cdef PyObject* shape = <PyObject*>tensor._shape
    cdef int64_t datatype, dim
    cdef uint64_t elements
    cdef string wrong
    if not is_small_int(<PyObject*>tensor._datatype, &datatype) or datatype < 1 or datatype > _BF16:
        return None
    cdef bint is_raw = datatype >= _BYTES
    if is_raw:
        if array != <PyObject*>None:
            return None
        array = <PyObject*>tensor._wire
    if array == NULL or not _is_flat(<object>array, <int>datatype) or (is_raw and fields(<object>array).nd != 1):
        return None
    found = <object>array
    output.datatype, output.source = datatype, 0
    output.size = output.whole = _size_of(found, datatype)
    if shape == NULL or type(<object>shape) is not tuple:
        return None
    found_shape = <object>shape
    output.first_dim, output.dims = dims.size(), len(<tuple>found_shape)
    if output.dims > _MAX_DIMS or not (is_raw or <int>output.dims == fields(found).nd):
        return None
    cdef size_t i
    for i in range(output.dims):
        # No code of the model's runs for a number of Python's own class.
        if not is_small_int(PyTuple_GetItem(found_shape, i), &dim) or dim < 0:
            return None
        if not is_raw and dim != fields(found).dims[i]:
            return None
        dims.push_back(dim)
    if not check_tensor(dims.data() + output.first_dim, output.dims, datatype, output.size, &elements, &wrong):
        return None
    return found


cdef bint add_lease(dict regions, Block block, list leases, list places, list lent) except -1:
    """Make a lease on a block, which it holds once its `give_back` is set, and add it and its place.

    `lent` gets what `Batch.lent` says of one in memory of clients, which is refused if that is None. Returns False if
    Python has to wait for the region, to map it, or to refuse the block.
    """
    cdef Py_buffer memory
    cdef int64_t size = block.size
    region = regions.get(block.region)
    cdef bint is_lent = type(region) is _lent_region
    if type(region) is not _shared_region and (not is_lent or lent is None):
        return False
    # There is none in a region that was closed, and in memory of clients before its first use.
    buffer = region.buffer
    if buffer is None:
        return False
    PyObject_GetBuffer(buffer, &memory, PyBUF_WRITABLE)
    cdef char* at = <char*>memory.buf + block.offset
    # Neither number has more than 63 bits.
    cdef bint is_within = block.offset + block.size <= <uint64_t>memory.len
    PyBuffer_Release(&memory)
    if not is_within:
        return False
    place = (block.region, block.offset)
    lease = view(_lease, _u1, 1, &size, at, 1, buffer)
    # No message may name a block of a client's memory, whose mapping is private to the process.
    lease.token, lease.region, lease.offset = place, None if is_lent else region, place[1]
    leases.append(lease)
    places.append(place)
    if is_lent:
        lent.append((region, place, size))
    return True


cdef TensorBase tensor_over(name, uint64_t datatype, const int64_t* dims, uint64_t count, uint64_t offset,
                            uint64_t size, lease):
    """Make a tensor over bytes in a lease. Strings and BF16 are viewed as bytes."""
    cdef TensorBase tensor = <TensorBase>make(_new_tensor, _tensor)
    cdef int64_t length = size
    cdef char* at = fields(lease).data + offset
    cdef size_t k
    tensor._name, tensor._datatype = name, _datatypes[datatype]
    tensor._shape = (dims[0],) if count == 1 else tuple([dims[k] for k in range(count)])
    if <int>datatype >= _BYTES:
        tensor._wire = view(_ndarray, _u1, 1, &length, at, 1, lease)
    else:
        tensor._array = view(_ndarray, <object>_descr_of[datatype], count, dims, at, kItemBytes[datatype], lease)
    return tensor


cdef InferenceResponseBase response_of(list outputs):
    cdef InferenceResponseBase response = <InferenceResponseBase>make(_new_response, _response)
    response._outputs = outputs
    return response


cdef class OutputPlacer:
    """Describes the outputs of one response after another."""

    cdef dict _indices
    cdef list _outputs
    # The outputs of the response that is placed now, and their dimensions.
    cdef vector[Output] _placed
    cdef vector[int64_t] _dims
    cdef Writer _row

    cdef bint _describe(self, wanted, InferenceResponseBase response, list arrays, dict places,
                        list targets) except -1:
        """Describe the outputs of a response that the client wants. Returns False if one of them is not just copied, or
        the response has an error or parameters.

        `places` has the targets for this response by their outputs, and `targets` gets that of each output or None;
        both are None if there are none.
        """
        cdef PyObject* given = <PyObject*>response._outputs
        cdef PyObject* parameters = <PyObject*>response._parameters
        cdef size_t i, k
        self._placed.clear()
        self._dims.clear()
        if <PyObject*>response._error != <PyObject*>None or parameters == NULL:
            return False
        if parameters != <PyObject*>None and (type(<object>parameters) is not dict or <object>parameters):
            return False
        if given == NULL or type(<object>given) is not list:
            return False
        names = None if wanted is self._outputs else wanted
        for tensor in <list>given:
            if not self._describe_output(tensor, names, arrays, places, targets):
                return False
        for i in range(1, self._placed.size()):
            for k in range(i):
                if self._placed[i].index == self._placed[k].index:
                    return False
        return True

    cdef bint _describe_output(self, tensor, names, list arrays, dict places, list targets) except -1:
        cdef Output output
        if not is_tensor(tensor):
            return False
        cdef PyObject* name = <PyObject*>(<TensorBase>tensor)._name
        # No code of the model's runs for a string of Python's own class.
        if name == NULL or type(<object>name) is not str or <PyObject*>(<TensorBase>tensor)._array == NULL:
            return False
        index = self._indices.get(<object>name)
        if index is None or (names is not None and <object>name not in names):
            return True  # as in Triton, it is left out without a check
        array = array_of(tensor, &output, &self._dims)
        if array is None:
            return False
        target = None
        if targets is not None:
            target = places.get(index)
            if target is not None and not 0 < output.size <= <uint64_t>(<tuple>target)[2]:
                target = None
        if target is None and output.size >= _PASSED_BYTES and not _is_own(array):
            return False
        output.index, output.offset = index, 0
        self._placed.push_back(output)
        arrays.append(array)
        if targets is not None:
            targets.append(target)
        return True

    cdef uint64_t _lay_out(self, uint64_t first, list targets) except? 0:
        """Place the outputs: each that has a target in a block of its own, from that number on, and the others one
        after another in the block behind those. Returns the size of that block.
        """
        cdef uint64_t end = 0, there = first, block = first
        cdef size_t i
        if targets is not None:
            for target in targets:
                block += target is not None
        self._row.clear()
        self._row.array(self._placed.size())
        for i in range(self._placed.size()):
            output = &self._placed[i]
            if targets is not None and targets[i] is not None:
                write_tensor(self._row, output.index, output.datatype, self._dims.data() + output.first_dim,
                             output.dims, there, 0, output.size)
                there += 1
                continue
            output.offset = end
            end += (output.size + _ALIGNMENT - 1) & ~(_ALIGNMENT - 1)
            write_tensor(self._row, output.index, output.datatype, self._dims.data() + output.first_dim, output.dims,
                         block, output.offset, output.size)
        return end


cdef class ApartPlacer(OutputPlacer):
    """Places responses that go apart from the answer to their batch. For any thread.

    No hook is called. But a collection of garbage may run a destructor of the model's, which may send a response in the
    middle of another one, or let other threads run.
    """

    cdef object _regions, _has_turn
    cdef OwnBlocks _blocks
    cdef Writer _message, _list
    cdef bint _is_placing

    def __init__(self, regions, dict indices):
        self._regions, self._indices, self._outputs = regions, indices, None
        self._blocks, self._has_turn = OwnBlocks(regions), regions._turn._is_owned
        self._is_placing = False

    def row(self, uint64_t batch, uint64_t index, uint64_t flags, response, wanted, list blocks, size_t most):
        """Place a response in a block that came back, and return its row of RESPONSES, of at most so many bytes.

        Adds the block to `blocks`. Returns None, and has done nothing, if Python has to do it.
        """
        if self._is_placing or type(response) is not _response or self._regions.devices is not None:
            return None
        self._is_placing = True
        try:
            return self._row_of(batch, index, flags, response, wanted, blocks, most)
        except Exception:
            return None  # Python's form meets the same
        finally:
            self._is_placing = False

    cdef _row_of(self, uint64_t batch, uint64_t index, uint64_t flags, response, wanted, list blocks, size_t most):
        cdef list arrays = [], named
        cdef Block place
        cdef uint64_t size
        if not self._describe(wanted, response, arrays, None, None) or not arrays:
            return None
        size = self._lay_out(0, None)
        if size >= LONG_COPY_BYTES or self._row.bytes().size() + ROW_ROOM > most or self._has_turn():
            return None
        block = self._blocks.take_spare(size)
        if block is None:
            return None
        try:
            place = self._blocks.fill(block, arrays, self._placed, None, size, None, 0)
            row = self._written(batch, index, flags, &place)
            named = [[place.region, place.offset, place.size]]
            blocks.extend(named)
        except BaseException:
            self._blocks.give_back(block)
            raise
        _counts.apart += 1
        return row

    cdef _written(self, uint64_t batch, uint64_t index, uint64_t flags, Block* place):
        cdef Writer* message = &self._message
        cdef Writer* layout = &self._list
        layout.clear()
        layout.array(1)
        layout.values(self._row.bytes())
        message.clear()
        message.array(6)
        message.uint(batch)
        message.uint(index)
        message.uint(flags)
        message.array(1)
        message.array(3)
        message.uint(place.region)
        message.uint(place.offset)
        message.uint(place.size)
        message.raw(layout.bytes())
        message.nil()
        return PyBytes_FromStringAndSize(message.bytes().data(), message.bytes().size())


cdef class StubPort(OutputPlacer):
    """The stub's end of a work channel."""

    cdef object _peer, _conversation, _inbox, _fileno, _receive, _checked, _send_waiting
    cdef object _regions, _returned, _replies, _cancelled, _give_back, _after_execute, _after_answer
    cdef BatchBase _batch
    cdef AnswerBase _answer
    cdef OwnBlocks _blocks
    # The blocks of the batch that the model has dropped, in a deque.
    cdef object _dropped, _forget_dropped
    cdef dict _requests
    cdef list _inputs
    # Of a batch that was opened stacked: the packet, and the leases on its blocks.
    cdef object _stacked_packet
    cdef list _stacked_leases
    # Of a batch that was opened stacked: the rows of each request, none if the model takes no batches.
    cdef readonly list counts
    cdef bint _is_decoupled, _was_quick
    cdef int64_t _look_ns
    cdef bint _is_socket
    # The channel if it is in memory, else None.
    cdef SlotChannel _slots
    # The core that the last EXECUTE came from.
    cdef uint64_t _peer_core
    cdef PlainBatch _opened
    cdef Writer _message
    cdef char[ROOM] _room

    def __init__(self, peer, start):
        channel = peer.conversation.channel
        self._peer, self._conversation = peer, peer.conversation
        self._inbox, self._fileno = channel.inbox, channel.descriptor
        self._receive, self._send_waiting = channel.receive, channel.send_waiting
        # Through a channel in memory, packets go by its own methods.
        self._is_socket = type(channel) is Channel
        self._slots = channel if type(channel) is SlotChannel else None
        self._checked = channel._checked if self._is_socket else None
        self._regions, self._returned, self._requests = peer.regions, peer.regions.returned, peer.regions.requests
        self._batch, self._answer, self._replies = peer.batch, peer.answer, peer.responses
        self._blocks = OwnBlocks(peer.regions)
        self._inputs, self._outputs = list(start["inputs"]), peer.batch.outputs
        self._indices = peer.placer.indices
        self._cancelled, self._give_back = peer.cancelled, peer.batch.give_back
        self._dropped, self._forget_dropped = peer.batch.returned, peer.batch.returned.clear
        self._after_execute, self._after_answer = peer.conversation.after[_EXECUTE], peer.conversation.after[_ANSWER]
        self._is_decoupled, self._look_ns = start["decoupled"], start["look_us"] * 1000
        self._was_quick, self._peer_core = False, kNoCore

    # Waiting

    def receive(self):
        """Return the next packet. Blocks. Raises as `Channel.receive` does."""
        if len(self._inbox) or not self._is_socket:
            return self._receive()
        cdef int64_t begin_ns = monotonic_ns() if self._look_ns > 0 else 0
        cdef ssize_t size = -1
        if self._was_quick and self._peer_core != kNoCore and self._peer_core != current_core():
            size = self._receive_packet(begin_ns + self._look_ns)
        self._peer_core = kNoCore
        while size < 0:
            # What came before would not interrupt the call below.
            PyErr_CheckSignals()
            size = self._receive_packet(0)
            if size < 0 and size != -EINTR:
                # The channel meets the same error, or after a reset the packets that the peer sent before its end.
                return self._receive()
        self._was_quick = self._look_ns > 0 and monotonic_ns() - begin_ns <= self._look_ns + WAKE_UPS_NS
        packet = PyBytes_FromStringAndSize(self._room, size)
        if size > 0 and <uint64_t>size <= kMaxPacketBytes:
            return packet
        return self._checked(packet)

    cdef ssize_t _receive_packet(self, int64_t until_ns) except? -2:
        """Receive a packet into the room, and return its size, or an error's number as a negative one.

        Looks for it until that time, or blocks if that is 0.
        """
        # Each time: a signal handler may have closed the channel.
        cdef int fd = self._fileno(), flags = MSG_DONTWAIT if until_ns else 0, error
        cdef ssize_t size
        with nogil:
            while True:
                size = c_recv(fd, self._room, ROOM, flags)
                error = errno
                if size >= 0 or until_ns == 0 or error != EAGAIN or monotonic_ns() >= until_ns:
                    break
        return size if size >= 0 else -error

    # Opening

    def open(self, packet):
        """Return the requests of an EXECUTE. Returns None, and has done nothing, if Python has to do it."""
        cdef list leases = [], places = [], lent = []
        cdef dict targets = {}
        if not self._read(packet) or not self._add_leases(leases, places, lent) or not self._aim(targets):
            return None
        cdef list requests = self._requests_over(leases)
        self._begin(leases, places, lent, targets, requests)
        return requests

    def open_stacked(self, packet, bint is_batched):
        """Return the inputs of a batch by their names, each with the rows of all requests one after another.

        Returns None, and has done nothing, if they do not lie so, or if the model wants to see requests.
        """
        cdef list leases = [], places = [], lent = [], counts = []
        if not self._read(packet) or not self._is_stacked(is_batched) or not self._add_leases(leases, places, lent):
            return None
        cdef dict arrays = {}
        cdef size_t i
        for i in range(self._opened.firsts[1]):
            arrays[self._inputs[self._opened.inputs[i].index]] = self._stacked(i, leases)
        if is_batched:
            for i in range(self._opened.requests()):
                counts.append(self._opened.shape(self._opened.inputs[self._opened.firsts[i]])[0])
        self.counts, self._stacked_packet, self._stacked_leases = counts, packet, leases
        self._begin(leases, places, lent, {}, [])
        _counts.stacked += 1
        return arrays

    def requests(self):
        """Return the requests of the batch that `open_stacked` has opened."""
        return self._requests_over(self._stacked_leases)

    cdef bint _read(self, packet) except -1:
        """Read an EXECUTE. Returns False if Python has to do it."""
        if type(packet) is not bytes or self._regions.devices is not None or len(<list?>self._batch.lent):
            return False
        turn = self._conversation.turn
        if turn is not self._after_answer and _EXECUTE not in turn[1]:
            return False
        cdef string_view said = string_view(PyBytes_AsString(packet), PyBytes_Size(packet))
        return self._opened.read(said, len(self._inputs)) and not self._opened.blocks.empty()

    cdef bint _is_stacked(self, bint is_batched):
        """Return True if the rows of each input lie one after another, and no request has strings or wishes."""
        cdef size_t requests = self._opened.requests(), i, k, dim
        if requests == 0 or (requests > 1 and not is_batched) or not self._opened.targets.empty():
            return False
        for i in range(self._opened.details.size()):
            if self._opened.details[i].is_rare:
                return False
        cdef size_t count = self._opened.firsts[1]
        cdef OutputLayout first, row
        cdef uint64_t end
        for k in range(count):
            first = self._opened.inputs[k]
            end = first.offset
            if <int>first.datatype >= _BYTES or (is_batched and first.dims == 0):
                return False
            for i in range(requests):
                if self._opened.firsts[i + 1] - self._opened.firsts[i] != count:
                    return False
                row = self._opened.inputs[self._opened.firsts[i] + k]
                if row.index != first.index or row.datatype != first.datatype or row.dims != first.dims:
                    return False
                if row.block != first.block or row.offset != end:
                    return False
                for dim in range(1, first.dims):
                    if self._opened.shape(row)[dim] != self._opened.shape(first)[dim]:
                        return False
                end += row.size
        return count > 0

    cdef _stacked(self, size_t number, list leases):
        """Return the rows of an input of all requests."""
        cdef OutputLayout first = self._opened.inputs[number]
        cdef vector[int64_t] dims
        cdef size_t i
        for i in range(first.dims):
            dims.push_back(self._opened.shape(first)[i])
        for i in range(1, self._opened.requests()):
            dims[0] += self._opened.shape(self._opened.inputs[self._opened.firsts[i] + number])[0]
        lease = leases[first.block]
        return view(_ndarray, _descrs[first.datatype], first.dims, dims.data(), fields(lease).data + first.offset,
                    kItemBytes[first.datatype], lease)

    cdef bint _add_leases(self, list leases, list places, list lent) except -1:
        """Make the leases on all blocks. Returns False if Python has to wait for a region or to refuse a block."""
        cdef size_t i
        for i in range(self._opened.blocks.size()):
            if not add_lease(self._requests, self._opened.blocks[i], leases, places, lent):
                return False
        return True

    cdef bint _aim(self, dict targets) except -1:
        """Note where outputs go in memory of clients, by request and output. Returns False as `_add_leases` does."""
        cdef size_t i
        for i in range(self._opened.targets.size()):
            row = self._opened.targets[i]
            region = self._requests.get(row.region)
            if type(region) is not _lent_region:
                return False
            target = tuple.__new__(_target, (region, row.offset, row.size))
            (<dict?>targets.setdefault(row.request, {}))[row.output] = target
        return True

    cdef list _requests_over(self, list leases):
        cdef size_t i
        return [self._request(i, self._opened.batch, leases) for i in range(self._opened.requests())]

    cdef int _begin(self, list leases, list places, list lent, dict targets, list requests) except -1:
        """Note that a batch is open whose objects are made."""
        cdef list released = [(place.region, place.offset) for place in self._opened.released]
        executing = (self._opened.batch, requests)
        # Up to here nothing has changed.
        self._conversation.turn = self._after_execute
        for each in released:
            self._returned.append(each)
        self._batch.places, self._batch.has_copies = places, self._opened.blocks[0].size > 0
        self._batch.targets = targets
        if lent:
            (<list?>self._batch.lent).extend(lent)
        for lease in leases:
            lease.give_back = self._give_back
        self._peer_core = self._opened.core
        self._peer.executing = executing
        # In this order: what comes now either finds the requests, or is seen here.
        if len(self._cancelled):
            self._peer.begun()
        _counts.open += 1
        return 0

    cdef _request(self, size_t index, batch_id, list leases):
        cdef list tensors = []
        cdef size_t i
        cdef OutputLayout row
        for i in range(self._opened.firsts[index], self._opened.firsts[index + 1]):
            row = self._opened.inputs[i]
            tensors.append(tensor_over(self._inputs[row.index], row.datatype, self._opened.shape(row), row.dims,
                                       row.offset, row.size, leases[row.block]))
        origin, details = (self._replies, batch_id, index), _NO_DETAILS
        cdef string_view packed
        if not self._opened.details.empty() and self._opened.details[index].packed.size() > 0:
            packed = self._opened.details[index].packed
            details = PyBytes_FromStringAndSize(packed.data(), packed.size())
            if self._opened.details[index].is_rare:
                # A hook. Nothing has changed yet.
                return self._batch.detailed(tensors, unpacked_details(details), origin)
        cdef InferenceRequestBase request = <InferenceRequestBase>make(_new_request, _request)
        request._row, request._inputs, request._origin = details, tensors, origin
        request._requested_output_names, request._trace = self._outputs, _untraced
        request._release_flags, request._cancelled = 0, False
        return request

    # Answering

    def take(self, list requests, returned):
        """Place the responses of the model. Returns False, and has done nothing, if Python has to check them first."""
        if type(returned) is not list or len(<list>returned) != len(requests) or self._is_decoupled:
            return False
        cdef Py_ssize_t i
        cdef bint is_last
        # A hook below may change the model's list.
        cdef tuple responses = tuple(<list>returned)
        for i in range(len(requests)):
            if type(responses[i]) is not _response or not self._is_plain(requests[i]):
                return False
        for i in range(len(requests)):
            is_last = i + 1 == len(requests)
            if not self._is_plain(requests[i]) or not self._place(requests[i], responses[i], is_last):
                # A hook: all that is rare of one response.
                self._answer.take_one(requests[i], responses[i])
        _counts.take += 1
        return True

    cdef bint _is_plain(self, request) except -1:
        """Return True for a request whose only response goes with the batch."""
        cdef int64_t flags
        if not is_request(request) or <PyObject*>(<InferenceRequestBase>request)._reply != <PyObject*>None:
            return False
        return is_small_int(<PyObject*>(<InferenceRequestBase>request)._release_flags, &flags) and flags == 0

    cdef bint _place(self, InferenceRequestBase request, InferenceResponseBase response, bint is_last) except -1:
        """Copy the outputs of a response into a block. Returns False, and has done nothing, if Python has to do it."""
        cdef list arrays = [], targets = None
        cdef dict places = self._batch.targets
        cdef PyObject* wanted = <PyObject*>request._requested_output_names
        if wanted == NULL or <PyObject*>request._preferred_memory != <PyObject*>None:
            return False
        cdef dict mine = places.get(len(<list>self._answer.layouts)) if len(places) else None
        if mine is not None:
            targets = []
        if not self._describe(<object>wanted, response, arrays, mine, targets):
            return False
        self._store(arrays, targets, is_last)
        return True

    cdef int _store(self, list arrays, list targets, bint is_last) except -1:
        """Copy outputs that were described: the next response of the answer, perhaps its last one.

        They go to their targets, and all that have none into a block.
        """
        cdef list blocks = self._answer.blocks, layouts = self._answer.layouts, named = []
        cdef Block place
        cdef size_t i, announced = self._last_long(targets)
        cdef uint64_t size = self._lay_out(len(blocks), targets)
        cdef SlotChannel slots = self._slots if is_last else None
        layout = PyBytes_FromStringAndSize(self._row.bytes().data(), self._row.bytes().size())
        if not arrays:
            layouts.append(layout)
            return 0
        block = None
        try:
            if targets is not None:
                for i in range(self._placed.size()):
                    target = targets[i]
                    if target is not None:
                        # A hook, where Python has to map the client's memory.
                        _deliver(target, arrays[i], &self._placed[i], slots if i + 1 == announced else None)
                        named.append([target[0].id, target[1], self._placed[i].size])
            if len(named) < len(arrays):
                # A hook, while it waits for memory.
                block = self._blocks.allocate(size)
                place = self._blocks.fill(block, arrays, self._placed, targets, size, slots, announced)
                named.append([place.region, place.offset, place.size])
            blocks.extend(named)
            try:
                layouts.append(layout)
            except MemoryError:
                del blocks[len(blocks) - len(named):]
                raise
        except Exception as failure:
            if block is not None:
                self._blocks.give_back(block)
            self._answer.refuse(failure)
        except BaseException:
            if block is not None:
                self._blocks.give_back(block)
            raise
        _counts.place += 1
        return 0

    def take_stacked(self, dict outputs):
        """Place the rows of all requests, which the model has returned by the names of the outputs.

        Returns False, and has done nothing, if Python has to do it.
        """
        cdef list arrays = [], counts = self.counts
        cdef int64_t rows = 0
        cdef size_t i
        for count in counts:
            rows += <int64_t>count
        self._placed.clear()
        self._dims.clear()
        for name, array in outputs.items():
            if not self._describe_rows(name, array, rows, len(counts)):
                return False
            arrays.append(array)
        cdef int64_t before = 0
        cdef Py_ssize_t left = len(counts)
        for count in counts:
            left -= 1
            for i in range(self._placed.size()):
                output = &self._placed[i]
                self._dims[output.first_dim] = count
                output.size = output.whole // <uint64_t>rows * <uint64_t>count if rows else 0
                output.source = output.whole // <uint64_t>rows * <uint64_t>before if rows else 0
            before += <int64_t>count
            self._store(arrays, None, left == 0)
        if not counts:
            self._store(arrays, None, True)
        _counts.take += 1
        return True

    cdef bint _describe_rows(self, name, array, int64_t rows, Py_ssize_t requests) except -1:
        """Describe an output of all requests. Returns False if it is not just copied."""
        cdef Output output
        cdef int datatype, k
        if type(name) is not str or not is_array(array) or fields(array).nd > <int>_MAX_DIMS:
            return False
        index = self._indices.get(name)
        if index is None or (requests and (fields(array).nd == 0 or fields(array).dims[0] != rows)):
            return False
        for datatype in range(1, _BYTES):
            if fields(array).descr == <void*>_descr_of[datatype]:
                break
        else:
            return False
        if not _is_flat(array, datatype):
            return False
        output.index, output.datatype, output.offset, output.source = index, datatype, 0, 0
        output.size = output.whole = _size_of(array, datatype)
        if output.size >= LONG_COPY_BYTES and (requests > 1 or not _is_own(array)):
            return False
        output.first_dim, output.dims = self._dims.size(), fields(array).nd
        for k in range(fields(array).nd):
            self._dims.push_back(fields(array).dims[k])
        self._placed.push_back(output)
        return True

    cdef size_t _last_long(self, list targets) except? 0:
        """Return the number, from 1 on, of the last output whose copy takes long, in their order; 0 if there is none.

        Those that have targets are copied before all others.
        """
        cdef size_t i, last = 0, last_target = 0
        for i in range(self._placed.size()):
            if self._placed[i].size >= LONG_COPY_BYTES:
                if targets is None or targets[i] is None:
                    last = i + 1
                else:
                    last_target = i + 1
        return last if last > 0 else last_target

    # Sending

    def give(self):
        """Answer the batch, of whose objects nothing else of ours is left.

        Returns False, and has done nothing, if Python has to do it. Raises `PeerGone`.
        """
        if self._regions.devices is not None:
            return False
        cdef BatchBase batch = self._batch
        cdef AnswerBase answer = self._answer
        batch_id = self._peer.executing[0]
        cdef int64_t kept
        cdef list held = [], released = []
        # Here the objects of the batch end, and its blocks come back, unless the model keeps one of them.
        self._stacked_packet = self._stacked_leases = None
        self._peer.executing = (batch_id, [])
        if (
            is_small_int(<PyObject*>batch.kept, &kept) and kept == 0
            and len(self._dropped) == len(<list>batch.places)
        ):
            self._forget_dropped()
        else:
            held, released = batch.end()
        cdef list blocks = answer.blocks, layouts = answer.layouts
        cdef dict remarks = answer.remarks, states = answer.states
        is_written = False
        try:
            is_written = self._write(batch_id, held, released, blocks, layouts, remarks, states)
        except Exception:
            pass  # Python's form meets the same
        if not is_written:
            self._peer.send((_ANSWER, batch_id, _NO_CORE, held, released, *answer.give()))
            return True
        del blocks[:]
        del layouts[:]
        if len(remarks):
            remarks.clear()
        if len(states):
            states.clear()
        self._send()
        self._conversation.turn = self._after_answer
        _counts.give += 1
        return True

    cdef bint _write(self, uint64_t batch_id, list held, list released, list blocks, list layouts, dict remarks,
                     dict states) except -1:
        """Write ANSWER. Returns False if it does not fit into a packet."""
        cdef Writer* message = &self._message
        cdef Writer* layout = &self._row
        cdef Py_ssize_t i
        layout.clear()
        layout.array(len(layouts))
        for packed in layouts:
            # Room for more would stay.
            if layout.bytes().size() + <uint64_t>len(<bytes?>packed) > kMaxPacketBytes:
                return False
            layout.values(string_view(PyBytes_AsString(packed), PyBytes_Size(packed)))
        message.clear()
        message.array(9)
        message.uint(kAnswer)
        message.uint(batch_id)
        message.uint(current_core())
        self._add_places(held)
        self._add_places(released)
        message.array(len(blocks))
        for row in blocks:
            message.array(3)
            for i in range(3):
                message.uint((<list?>row)[i])
        message.raw(layout.bytes())
        self._add_values([remarks.get(i) for i in range(len(layouts))] if len(remarks) else None)
        self._add_values([states.get(i, _ANSWERED) for i in range(len(layouts))] if len(states) else None)
        return message.bytes().size() <= kMaxPacketBytes

    cdef int _add_places(self, list places) except -1:
        self._message.array(len(places))
        for region, offset in places:
            self._message.array(2)
            self._message.uint(region)
            self._message.uint(offset)
        return 0

    cdef int _add_values(self, values) except -1:
        """Add a list of Python's to the message."""
        if values is None:
            self._message.nil()
            return 0
        cdef bytes packed = pack(values)
        self._message.values(string_view(PyBytes_AsString(packed), PyBytes_Size(packed)))
        return 0

    cdef int _send(self) except -1:
        """Send the message as `Channel.send_waiting` does."""
        cdef ssize_t sent
        cdef int fd, error
        cdef string_view said = self._message.bytes()
        cdef const char* data = said.data()
        cdef size_t size = said.size()
        if not self._is_socket:
            self._send_waiting(PyBytes_FromStringAndSize(data, size))
            return 0
        while True:
            fd = self._fileno()
            with nogil:
                sent = c_send(fd, data, size, MSG_NOSIGNAL)
                error = errno
            if sent >= 0:
                return 0
            if error != EINTR:
                # Nothing was sent. The channel meets the same error, and knows its name.
                self._send_waiting(PyBytes_FromStringAndSize(data, size))
                return 0
            PyErr_CheckSignals()


cdef bint _is_flat(array, int datatype):
    """Return True for a plain array of this datatype, in one piece."""
    if not is_array(array) or not (fields(array).flags & kContiguous):
        return False
    return fields(array).descr == <void*>_descr_of[datatype]


cdef uint64_t _size_of(array, int datatype):
    """Return the bytes of a flat array."""
    return bytes_of(array, 1 if datatype >= _BYTES else kItemBytes[datatype])


cdef bint _is_own(array):
    """Return True for an array that lies in no lease. Returns False if it may lie in one."""
    cdef Array* seen = fields(array)
    while seen.base != NULL:
        base = <object>seen.base
        if not isinstance(base, _ndarray):
            return True
        # A lease, and every other subclass of arrays, is left to Python.
        if not is_array(base):
            return False
        seen = fields(base)
    return True
