# distutils: language = c++
# cython: language_level=3, binding=False, annotation_typing=False
# cython: boundscheck=True, wraparound=True, nonecheck=True, overflowcheck=True
"""The compiled form of `port.py`, which says what everything here is for, and of the calls in `_stub_port_calls.cpp`.

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
from cpython.object cimport PyObject
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.vector cimport vector

from moonpool.ipc.port._port cimport (
    MSG_DONTWAIT, MSG_NOSIGNAL, Array, Block, OutputLayout, Writer, add_sources, bytes_of, c_recv, c_send, copy,
    current_core, fields, find_table, flag, is_array, kAnswer, kContiguous, kItemBytes, kMaxPacketBytes, kNoCore,
    monotonic_ns, string_view, view,
)

import numpy as np

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import pack, unpacked_details
from moonpool.ipc.memory import ALIGNMENT, Lease
from moonpool.ipc.messages import ANSWERED, MAX_DIMS, NO_CORE, Kind
from moonpool.ipc.tensors import BF16, BYTES, DTYPES
from moonpool.stub.peers.placement import PASSED_BYTES

cdef extern from "port.h" namespace "moonpool":
    ctypedef struct Place "moonpool::wire::Place":
        uint64_t region, offset
    ctypedef struct DetailsRow "moonpool::PlainBatch::Details":
        string_view packed
        flag is_rare
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

cdef extern from "answer.h" namespace "moonpool":
    flag check_tensor(const int64_t*, uint64_t, uint64_t, uint64_t, uint64_t*, string*)

cdef extern from "place.h" namespace "moonpool":
    void write_tensor(Writer&, const uint64_t&, uint64_t, const int64_t*, uint64_t, uint64_t, uint64_t,
                      uint64_t) except +

cdef extern from "_stub_port_batch.h" namespace "moonpool::python":
    int add_asker(object) except -1
    bint as_number(PyObject*, int64_t*)
    # A slot that is not set is null. These give no reference of their own.
    cdef cppclass Field:
        PyObject* peek(object)
        flag set_to(object, object)
    cdef cppclass SlotsKind "moonpool::python::Kind":
        flag holds "is"(object)
    cdef cppclass Leases:
        Field give_back, token, region, offset
    cdef cppclass Tensors:
        SlotsKind kind
        Field name, datatype, shape, array, wire
    cdef cppclass Responses:
        SlotsKind kind
        Field outputs, error, parameters
    cdef cppclass Regions:
        SlotsKind kind
        Field id, buffer, size_bytes
    cdef cppclass Blocks:
        SlotsKind kind
        Field region, offset
    cdef cppclass Requests:
        SlotsKind kind
        Field names, preferred_memory, release_flags, reply
    cdef cppclass Batches:
        Field places, has_copies, targets, kept, lent
    cdef cppclass Answers:
        Field blocks, layouts, remarks, states
    cdef cppclass Conversations:
        Field turn
    cdef cppclass BatchObjects:
        flag know(object parts, object request, object batch, object answer, object conversation) except False
        object tensor(object name, object datatype, object shape, object array, flag is_raw)
        object request(object inputs, object origin, PyObject* row)
        object block(object size)
        flag give_back(object block) except False
        Leases lease_
        Tensors tensor_
        Responses response_
        Regions region_
        Blocks block_
        Requests request_
        Batches batch_
        Answers answer_
        Conversations conversation_

add_sources(sys.modules[__name__])
find_table(np.ones((2, 3), np.float32))

add_asker(sys.modules[__name__])

cdef object _ndarray = np.ndarray
cdef object _u1 = np.dtype(np.uint8)
# By datatype; the bytes for those that are viewed so.
cdef list _descrs = [DTYPES[code] if code in DTYPES and code < BYTES else _u1 for code in range(15)]
cdef list _datatypes = list(range(15))
cdef int _BYTES = BYTES, _BF16 = BF16
cdef size_t _MAX_DIMS = MAX_DIMS
cdef uint64_t _ALIGNMENT = ALIGNMENT
cdef int64_t _PASSED_BYTES = PASSED_BYTES
cdef object _EXECUTE = int(Kind.EXECUTE)
cdef object _ANSWER = int(Kind.ANSWER)
cdef object _NO_CORE = NO_CORE, _ANSWERED = ANSWERED
cdef enum:
    # As in `Channel`: a longer packet is recognized by one byte more.
    ROOM = 32769
    # A copy from this size on takes so long that others should have the interpreter meanwhile.
    LONG_COPY_BYTES = 262144
    # A wait takes so much more than the peer's work if both sides sleep: the time of two wake-ups.
    WAKE_UPS_NS = 100000


# For tests: a method that always declines would pass all others.
cdef struct Counts:
    uint64_t open, stacked, place, take, give

cdef Counts _counts


def counts():
    """Return how often each method did its work."""
    return dict(_counts)


# An output that is copied: so many bytes of an array that has `whole`, from `source` on.
cdef struct Output:
    uint64_t index, datatype, size, offset, source, whole
    size_t first_dim, dims


cdef class StubPort:
    """The stub's end of a work channel."""

    cdef object _peer, _conversation, _inbox, _fileno, _receive, _checked, _send_waiting
    cdef object _regions, _returned, _batch, _answer, _replies, _cancelled, _give_back, _after_execute, _after_answer
    # The blocks of the batch that the model has dropped, in a deque.
    cdef object _dropped, _forget_dropped
    cdef dict _requests, _indices
    cdef list _inputs, _outputs
    # Of a batch that was opened stacked: the packet, and the leases on its blocks.
    cdef object _stacked_packet
    cdef list _stacked_leases
    # Of a batch that was opened stacked: the rows of each request, none if the model takes no batches.
    cdef readonly list counts
    cdef bint _is_decoupled, _was_quick
    cdef int64_t _look_ns
    cdef bint _is_socket
    # The core that the last EXECUTE came from.
    cdef uint64_t _peer_core
    cdef BatchObjects* _objects
    cdef PlainBatch _opened
    # The outputs of the response that is placed now, and their dimensions.
    cdef vector[Output] _placed
    cdef vector[int64_t] _dims
    cdef Writer _row, _message
    cdef char[ROOM] _room

    def __cinit__(self):
        self._objects = new BatchObjects()

    def __init__(self, peer, start, dict parts, request):
        """`parts` are the objects with which compiled forms work; `request` is one that nobody uses."""
        channel = peer.conversation.channel
        self._peer, self._conversation = peer, peer.conversation
        self._inbox, self._fileno = channel.inbox, channel.descriptor
        self._receive, self._send_waiting = channel.receive, channel.send_waiting
        # Through a channel in memory, packets go by its own methods.
        self._is_socket = type(channel) is Channel
        self._checked = channel._checked if self._is_socket else None
        self._regions, self._returned, self._requests = peer.regions, peer.regions.returned, peer.regions.requests
        self._batch, self._answer, self._replies = peer.batch, peer.answer, peer.responses
        self._inputs, self._outputs = list(start["inputs"]), request._requested_output_names
        self._indices = peer.placer.indices
        self._cancelled, self._give_back = peer.cancelled, peer.batch.give_back
        self._dropped, self._forget_dropped = peer.batch.returned, peer.batch.returned.clear
        self._after_execute, self._after_answer = peer.conversation.after[_EXECUTE], peer.conversation.after[_ANSWER]
        self._is_decoupled, self._look_ns = start["decoupled"], start["look_us"] * 1000
        self._was_quick, self._peer_core = False, kNoCore
        self._objects.know(parts, request, peer.batch, peer.answer, peer.conversation)

    def __dealloc__(self):
        del self._objects

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
        cdef list regions = self._read(packet)
        if regions is None:
            return None
        cdef list leases = [], places = []
        self._add_leases(regions, leases, places)
        cdef list requests = self._requests_over(leases)
        self._begin(leases, places, requests)
        return requests

    def open_stacked(self, packet, bint is_batched):
        """Return the inputs of a batch by their names, each with the rows of all requests one after another.

        Returns None, and has done nothing, if they do not lie so, or if the model wants to see requests.
        """
        cdef list regions = self._read(packet)
        if regions is None or not self._is_stacked(is_batched):
            return None
        cdef list leases = [], places = [], counts = []
        self._add_leases(regions, leases, places)
        cdef dict arrays = {}
        cdef size_t i
        for i in range(self._opened.firsts[1]):
            arrays[self._inputs[self._opened.inputs[i].index]] = self._stacked(i, leases)
        if is_batched:
            for i in range(self._opened.requests()):
                counts.append(self._opened.shape(self._opened.inputs[self._opened.firsts[i]])[0])
        self.counts, self._stacked_packet, self._stacked_leases = counts, packet, leases
        self._begin(leases, places, [])
        _counts.stacked += 1
        return arrays

    def requests(self):
        """Return the requests of the batch that `open_stacked` has opened."""
        return self._requests_over(self._stacked_leases)

    cdef list _read(self, packet):
        """Read an EXECUTE, and return the regions of its blocks. Returns None if Python has to do it."""
        cdef PyObject* turn = self._objects.conversation_.turn.peek(self._conversation)
        if type(packet) is not bytes or self._regions.devices is not None:
            return None
        if turn != <PyObject*>self._after_answer and _EXECUTE not in (<object>turn)[1]:
            return None
        cdef string_view said = string_view(PyBytes_AsString(packet), PyBytes_Size(packet))
        if not self._opened.read(said, len(self._inputs)) or self._opened.blocks.empty():
            return None
        return self._find_regions()

    cdef bint _is_stacked(self, bint is_batched):
        """Return True if the rows of each input lie one after another, and no request has strings or wishes."""
        cdef size_t requests = self._opened.requests(), i, k, dim
        if requests == 0 or (requests > 1 and not is_batched):
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

    cdef int _add_leases(self, list regions, list leases, list places) except -1:
        cdef Py_ssize_t i
        for i in range(len(regions)):
            self._add_lease(regions[i], self._opened.blocks[i], leases, places)
        return 0

    cdef list _requests_over(self, list leases):
        cdef size_t i
        return [self._request(i, self._opened.batch, leases) for i in range(self._opened.requests())]

    cdef int _begin(self, list leases, list places, list requests) except -1:
        """Note that a batch is open whose objects are made."""
        cdef list released = [(place.region, place.offset) for place in self._opened.released]
        cdef dict no_targets = {}
        executing = (self._opened.batch, requests)
        # Up to here nothing has changed.
        self._objects.conversation_.turn.set_to(self._conversation, self._after_execute)
        for each in released:
            self._returned.append(each)
        self._objects.batch_.places.set_to(self._batch, places)
        self._objects.batch_.has_copies.set_to(self._batch, self._opened.blocks[0].size > 0)
        self._objects.batch_.targets.set_to(self._batch, no_targets)
        for lease in leases:
            self._objects.lease_.give_back.set_to(lease, self._give_back)
        self._peer_core = self._opened.core
        self._peer.executing = executing
        # In this order: what comes now either finds the requests, or is seen here.
        if len(self._cancelled) or self._peer.is_gone:
            self._peer.begun()
        _counts.open += 1
        return 0

    cdef list _find_regions(self):
        """Return the regions of the blocks, or None if Python has to wait for one or to refuse a block."""
        cdef list regions = []
        cdef Block block
        cdef int64_t room
        cdef size_t i
        for i in range(self._opened.blocks.size()):
            block = self._opened.blocks[i]
            region = self._requests.get(block.region)
            # Memory of clients is of another class.
            if region is None or not self._objects.region_.kind.holds(region):
                return None
            if not as_number(self._objects.region_.size_bytes.peek(region), &room) or room < 0:
                return None
            # Neither number has more than 63 bits.
            if block.offset + block.size > <uint64_t>room:
                return None
            if self._objects.region_.buffer.peek(region) == <PyObject*>None:
                return None  # it was closed
            regions.append(region)
        return regions

    cdef int _add_lease(self, region, Block block, list leases, list places) except -1:
        cdef Py_buffer memory
        cdef int64_t size = block.size
        buffer = <object>self._objects.region_.buffer.peek(region)
        PyObject_GetBuffer(buffer, &memory, PyBUF_WRITABLE)
        cdef char* at = <char*>memory.buf + block.offset
        cdef bint is_within = block.offset + block.size <= <uint64_t>memory.len
        PyBuffer_Release(&memory)
        if not is_within:
            raise ValueError(f"region {block.region} is smaller than it says")
        lease = view(Lease, _u1, 1, &size, at, 1, buffer)
        place = (block.region, block.offset)
        self._objects.lease_.token.set_to(lease, place)
        self._objects.lease_.region.set_to(lease, region)
        self._objects.lease_.offset.set_to(lease, place[1])
        leases.append(lease)
        places.append(place)
        return 0

    cdef _request(self, size_t index, batch_id, list leases):
        cdef list tensors = []
        cdef size_t i
        for i in range(self._opened.firsts[index], self._opened.firsts[index + 1]):
            tensors.append(self._tensor(self._opened.inputs[i], leases))
        origin = (self._replies, batch_id, index)
        if self._opened.details.empty() or self._opened.details[index].packed.size() == 0:
            return self._objects.request(tensors, origin, NULL)
        cdef string_view packed = self._opened.details[index].packed
        row = PyBytes_FromStringAndSize(packed.data(), packed.size())
        if not self._opened.details[index].is_rare:
            return self._objects.request(tensors, origin, <PyObject*>row)
        # A hook. Nothing has changed yet.
        return self._batch.detailed(tensors, unpacked_details(row), origin)

    cdef _tensor(self, OutputLayout row, list leases):
        cdef const int64_t* dims = self._opened.shape(row)
        cdef bint is_raw = <int>row.datatype >= _BYTES
        cdef int64_t size = row.size
        cdef size_t k
        lease = leases[row.block]
        cdef char* at = fields(lease).data + row.offset
        if is_raw:
            array = view(_ndarray, _u1, 1, &size, at, 1, lease)
        else:
            array = view(_ndarray, _descrs[row.datatype], row.dims, dims, at, kItemBytes[row.datatype], lease)
        shape = tuple([dims[k] for k in range(row.dims)])
        return self._objects.tensor(self._inputs[row.index], _datatypes[row.datatype], shape, array, is_raw)

    # Answering

    def take(self, list requests, returned):
        """Place the responses of the model. Returns False, and has done nothing, if Python has to check them first."""
        if type(returned) is not list or len(<list>returned) != len(requests) or self._is_decoupled:
            return False
        cdef Py_ssize_t i
        # A hook below may change the model's list.
        cdef tuple responses = tuple(<list>returned)
        for i in range(len(requests)):
            if not self._objects.response_.kind.holds(responses[i]) or not self._is_plain(requests[i]):
                return False
        for i in range(len(requests)):
            if not self._is_plain(requests[i]) or not self._place(requests[i], responses[i]):
                # A hook: all that is rare of one response.
                self._answer.take_one(requests[i], responses[i])
        _counts.take += 1
        return True

    cdef bint _is_plain(self, request) except -1:
        """Return True for a request whose only response goes with the batch."""
        cdef int64_t flags
        if not self._objects.request_.kind.holds(request):
            return False
        if self._objects.request_.reply.peek(request) != <PyObject*>None:
            return False
        return as_number(self._objects.request_.release_flags.peek(request), &flags) and flags == 0

    cdef bint _place(self, request, response) except -1:
        """Copy the outputs of a response into a block. Returns False, and has done nothing, if Python has to do it."""
        cdef list arrays = []
        cdef PyObject* parameters = self._objects.response_.parameters.peek(response)
        if self._objects.response_.error.peek(response) != <PyObject*>None:
            return False
        if self._objects.request_.preferred_memory.peek(request) != <PyObject*>None:
            return False
        if parameters == NULL:
            return False
        if parameters != <PyObject*>None and (type(<object>parameters) is not dict or <object>parameters):
            return False
        if len(<dict>self._objects.batch_.targets.peek(self._batch)) or not self._describe(request, response, arrays):
            return False
        self._store(arrays)
        return True

    cdef int _store(self, list arrays) except -1:
        """Copy outputs that were described into a block: the next response of the answer."""
        cdef list blocks = <list>self._objects.answer_.blocks.peek(self._answer)
        cdef list layouts = <list>self._objects.answer_.layouts.peek(self._answer)
        cdef uint64_t size = self._lay_out(len(blocks))
        layout = PyBytes_FromStringAndSize(self._row.bytes().data(), self._row.bytes().size())
        if not arrays:
            layouts.append(layout)
            return 0
        block = None
        try:
            # A hook, while it waits for memory.
            block = self._objects.block(size)
            blocks.append(self._fill(block, arrays, size))
            try:
                layouts.append(layout)
            except MemoryError:
                blocks.pop()
                raise
        except Exception as failure:
            if block is not None:
                self._objects.give_back(block)
            self._answer.refuse(failure)
        except BaseException:
            if block is not None:
                self._objects.give_back(block)
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
        for count in counts:
            for i in range(self._placed.size()):
                output = &self._placed[i]
                self._dims[output.first_dim] = count
                output.size = output.whole // <uint64_t>rows * <uint64_t>count if rows else 0
                output.source = output.whole // <uint64_t>rows * <uint64_t>before if rows else 0
            before += <int64_t>count
            self._store(arrays)
        if not counts:
            self._store(arrays)
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
            if fields(array).descr == <void*>_descrs[datatype]:
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

    cdef bint _describe(self, request, response, list arrays) except -1:
        """Describe the outputs of a response that the client wants. Returns False if one of them is not just copied."""
        cdef PyObject* given = self._objects.response_.outputs.peek(response)
        cdef PyObject* wanted = self._objects.request_.names.peek(request)
        cdef size_t i, k
        self._placed.clear()
        self._dims.clear()
        if given == NULL or type(<object>given) is not list or wanted == NULL:
            return False
        names = None if wanted == <PyObject*>self._outputs else <object>wanted
        for tensor in <list>given:
            if not self._describe_output(tensor, names, arrays):
                return False
        for i in range(1, self._placed.size()):
            for k in range(i):
                if self._placed[i].index == self._placed[k].index:
                    return False
        return True

    cdef bint _describe_output(self, tensor, names, list arrays) except -1:
        cdef Output output
        cdef int64_t datatype
        if not self._objects.tensor_.kind.holds(tensor):
            return False
        cdef PyObject* name = self._objects.tensor_.name.peek(tensor)
        cdef PyObject* held = self._objects.tensor_.array.peek(tensor)
        # No code of the model's runs for a string of Python's own class.
        if name == NULL or type(<object>name) is not str or held == NULL:
            return False
        index = self._indices.get(<object>name)
        if index is None or (names is not None and <object>name not in names):
            return True  # as in Triton, it is left out without a check
        if not as_number(self._objects.tensor_.datatype.peek(tensor), &datatype) or datatype < 1 or datatype > _BF16:
            return False
        cdef bint is_raw = datatype >= _BYTES
        if is_raw:
            if held != <PyObject*>None:
                return False
            held = self._objects.tensor_.wire.peek(tensor)
            if held == NULL:
                return False
        array = <object>held
        if not _is_flat(array, <int>datatype) or (is_raw and fields(array).nd != 1):
            return False
        output.index, output.datatype, output.offset, output.source = index, datatype, 0, 0
        output.size = output.whole = _size_of(array, datatype)
        if not self._add_shape(tensor, &output) or not (is_raw or self._is_shape_of(&output, fields(array))):
            return False
        if <int64_t>output.size >= _PASSED_BYTES and not _is_own(array):
            return False
        self._placed.push_back(output)
        arrays.append(array)
        return True

    cdef bint _add_shape(self, tensor, Output* output) except -1:
        """Add the dimensions of a tensor. Returns False if they are not those of so many bytes."""
        cdef PyObject* given = self._objects.tensor_.shape.peek(tensor)
        cdef int64_t dim
        cdef uint64_t elements
        cdef string wrong
        if given == NULL or type(<object>given) is not tuple:
            return False
        cdef tuple shape = <tuple>given
        output.first_dim, output.dims = self._dims.size(), len(shape)
        if output.dims > _MAX_DIMS:
            return False
        for each in shape:
            if not as_number(<PyObject*>each, &dim) or dim < 0:
                return False
            self._dims.push_back(dim)
        cdef const int64_t* dims = self._dims.data() + output.first_dim
        return check_tensor(dims, output.dims, output.datatype, output.size, &elements, &wrong)

    cdef bint _is_shape_of(self, Output* output, Array* array):
        cdef int k
        if array.nd != <int>output.dims:
            return False
        for k in range(array.nd):
            if array.dims[k] != self._dims[output.first_dim + k]:
                return False
        return True

    cdef uint64_t _lay_out(self, uint64_t block) except? 0:
        """Place the outputs one after another in the block of that number. Returns its size."""
        cdef uint64_t end = 0
        cdef size_t i
        self._row.clear()
        self._row.array(self._placed.size())
        for i in range(self._placed.size()):
            output = &self._placed[i]
            output.offset = end
            end += (output.size + _ALIGNMENT - 1) & ~(_ALIGNMENT - 1)
            write_tensor(self._row, output.index, output.datatype, self._dims.data() + output.first_dim, output.dims,
                         block, output.offset, output.size)
        return end

    cdef list _fill(self, block, list arrays, uint64_t size):
        """Copy the outputs into a block, and return its row.

        Raises `ValueError` for an array that is another one now.
        """
        cdef Py_buffer memory
        cdef int64_t start = -1
        cdef size_t i
        cdef PyObject* region = NULL
        if self._objects.block_.kind.holds(block):
            region = self._objects.block_.region.peek(block)
        if region == NULL or not self._objects.region_.kind.holds(<object>region):
            raise ValueError("a block is not in shared memory")
        within = <object>region
        as_number(self._objects.block_.offset.peek(block), &start)
        cdef list row = [<object>self._objects.region_.id.peek(within), start, size]
        cdef char* to
        cdef const char* data
        cdef size_t length
        buffer = <object>self._objects.region_.buffer.peek(within)
        PyObject_GetBuffer(buffer, &memory, PyBUF_WRITABLE)
        try:
            # The tables are this process's own, which the model may have changed.
            if start < 0 or start > memory.len or size > <uint64_t>(memory.len - start):
                raise ValueError("a block is not within its region")
            for i in range(self._placed.size()):
                array, output = arrays[i], &self._placed[i]
                # Also after a long copy, during which other threads of the model ran.
                if not _is_flat(array, output.datatype) or _size_of(array, output.datatype) != output.whole:
                    raise ValueError("an array was changed while it was sent")
                to, data = <char*>memory.buf + start + output.offset, fields(array).data + output.source
                length = output.size
                if length >= LONG_COPY_BYTES:
                    with nogil:
                        copy(to, data, length)
                else:
                    memcpy(to, data, length)
        finally:
            PyBuffer_Release(&memory)
        return row

    # Sending

    def give(self):
        """Answer the batch, of whose objects nothing else of ours is left.

        Returns False, and has done nothing, if Python has to do it. Raises `PeerGone`.
        """
        if self._regions.devices is not None:
            return False
        batch, answer = self._batch, self._answer
        batch_id = self._peer.executing[0]
        cdef int64_t kept
        cdef list held = [], released = []
        # Here the objects of the batch end, and its blocks come back, unless the model keeps one of them.
        self._stacked_packet = self._stacked_leases = None
        self._peer.executing = (batch_id, [])
        if (
            as_number(self._objects.batch_.kept.peek(batch), &kept) and kept == 0
            and len(self._dropped) == len(<list>self._objects.batch_.places.peek(batch))
            and len(<list>self._objects.batch_.lent.peek(batch)) == 0
        ):
            self._forget_dropped()
        else:
            held, released = batch.end()
        cdef list blocks = <list>self._objects.answer_.blocks.peek(answer)
        cdef list layouts = <list>self._objects.answer_.layouts.peek(answer)
        cdef dict remarks = <dict>self._objects.answer_.remarks.peek(answer)
        cdef dict states = <dict>self._objects.answer_.states.peek(answer)
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
        self._objects.conversation_.turn.set_to(self._conversation, self._after_answer)
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
    return fields(array).descr == <void*>_descrs[datatype]


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
