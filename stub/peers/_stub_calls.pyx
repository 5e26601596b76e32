# distutils: language = c++
# cython: language_level=3, binding=False, annotation_typing=False
# cython: boundscheck=True, wraparound=True, nonecheck=True, overflowcheck=True
"""The usual call of another model, as `StubHost.infer` does it, compiled.

Theory of operation. A thread that asks is the leader from before it sends INFER until it has read REPLY
(`stub/hosts/calls.py`). So nobody else can receive its reply, no object of Python's has to stand for the call, and
what the asker keeps meanwhile is the leader's alone. Any thread may ask. If another thread leads, because it waits,
too, or for coroutines, Python does all of it.

Where anything is not as it mostly is before INFER is sent, nothing has changed, and Python does all of it. Afterwards
the call is left to Python: a `Call` for it is open and in the list `left`, and Python waits for its answer, or abandons
it after an exception. A packet that is not the reply goes to the channel's inbox first, so Python finds it there.

A signal handler of the model's may raise on the main thread: where the asker waits, and where Python waits for memory.
All else that is called here is of C. So no handler runs between a step and the next one, and what a handler raised
leaves the asker as it is.

INFER has the bytes that Python would send: one block with all inputs, placed by arithmetic, whatever they are. REPLY
is checked by the table of which Python's check is made. The runtime is trusted with this memory anyway, but a block
must lie within its region, and an output within its block. Nothing is kept from one call to the next. What comes from
the model may have any type, and is looked at as `_stub_port.pyx` says.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint64_t
from libcpp.vector cimport vector

from moonpool.ipc.port._port cimport (
    MSG_DONTWAIT, MSG_NOSIGNAL, Block, Writer, add_sources, c_recv, c_send, find_table, flag, kAlignment,
    kMaxPacketBytes, string_view,
)
from moonpool.stub.peers._stub_port cimport (
    InferenceRequestBase, Output, OwnBlocks, TensorBase, add_lease, array_of, is_request, is_small_int, is_tensor,
    response_of, tensor_over,
)

import sys

import numpy as np

from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.messages import Kind

cdef extern from "call.h" namespace "moonpool":
    ctypedef struct Place "moonpool::wire::Place":
        uint64_t region, offset
    ctypedef struct NamedLayout:
        string_view name
        uint64_t datatype, dims, block, offset, size
    cdef cppclass PlainReply:
        flag read(string_view packet)
        const int64_t* shape(const NamedLayout&)
        uint64_t call
        vector[Place] released
        vector[Block] blocks
        vector[NamedLayout] tensors

cdef extern from "place.h" namespace "moonpool":
    void write_tensor(Writer&, const string_view&, uint64_t, const int64_t*, uint64_t, uint64_t, uint64_t,
                      uint64_t) except +

cdef extern from *:
    # Of Python's limited API, where cpython.unicode has macros.
    const char* PyUnicode_AsUTF8AndSize(PyObject*, Py_ssize_t*) except NULL
    object PyUnicode_DecodeUTF8(const char*, Py_ssize_t, const char*)

add_sources(sys.modules[__name__])
find_table(np.ones((2, 3), np.float32))

cdef uint64_t _INFER = Kind.INFER
cdef enum:
    # As in `Channel`: a longer packet is recognized by one byte more.
    ROOM = 32769
    # A larger input is copied as Python does it, and so are more of them.
    MOST_BYTES = 16384
    MOST_COPIED_BYTES = 262144
    # More places are reported in several messages.
    MOST_RELEASED = 1024


cdef class Asker:
    """The stub's end of a calls channel, for usual calls."""

    # Of `Calls`.
    cdef object _numbers, _leads, _lead, _stop, _queued, _fileno, _inbox, _released, _take_released, _give_back
    cdef dict _followers, _open
    # A call that was sent, and the names and values of its attributes.
    cdef object _call_type, _end_process
    cdef list _of_a_call
    cdef object _host, _regions, _allocates, _details, _untraced
    cdef dict _request_regions
    cdef OwnBlocks _blocks
    # Of the leader: where the inputs lie, and their dimensions; the fields of INFER before the places, and those behind
    # the blocks; INFER, and REPLY.
    cdef vector[Output] _placed
    cdef vector[int64_t] _dims
    cdef Writer _head, _tail, _message
    cdef char[ROOM] _packet
    cdef PlainReply _reply

    def __init__(self, host, calls, regions, sent, InferenceRequestBase usual, end_process):
        """`sent` is a call that was sent, and `usual` a request with nothing but inputs. Nobody uses them."""
        channel, leading = calls._channel, calls._leading
        self._numbers, self._followers, self._open = calls._numbers, calls._followers, calls._open
        self._leads, self._lead, self._stop = leading._is_owned, leading.acquire, leading.release
        self._queued, self._fileno, self._inbox = calls._send_queue.items, channel.descriptor, channel.inbox
        self._released, self._take_released = calls.released, calls.released.popleft
        self._give_back, self._end_process = calls.give_back, end_process
        self._call_type = type(sent)
        self._of_a_call = [(name, getattr(sent, name)) for name in self._call_type.__slots__]
        self._host, self._regions, self._allocates = host, regions, regions._turn._is_owned
        self._request_regions, self._blocks = regions.requests, OwnBlocks(regions)
        self._details, self._untraced = usual._row, usual._trace

    def infer(self, request, list left):
        """Return the response to a usual request, or NotImplemented for any other.

        If `left` has a call afterwards, Python has to wait for its answer, or to abandon it if there is an exception.
        """
        if not self._is_usual(request):
            return NotImplemented
        # A destructor that interrupts this very thread where it leads or allocates. Python refuses that.
        if self._leads() or self._allocates() or not self._lead(False):
            return NotImplemented
        try:
            return self._ask(request, left)
        finally:
            self._stop_leading()

    cdef bint _is_usual(self, request) except -1:
        if not is_request(request):
            return False
        cdef InferenceRequestBase seen = <InferenceRequestBase>request
        if <PyObject*>seen._origin != <PyObject*>None or <PyObject*>seen._preferred_memory != <PyObject*>None:
            return False
        if <PyObject*>seen._row != <PyObject*>self._details or <PyObject*>seen._trace != <PyObject*>self._untraced:
            return False
        return self._host.serves is True and self._regions.devices is None

    cdef int _stop_leading(self) except -1:
        """Give up `_leading`, and wake a thread that waits for that."""
        self._stop()
        if not self._followers:
            return 0
        for follower in self._followers.values():
            bell = follower.bell
            try:
                if bell is not None:
                    bell.release()
            except RuntimeError:  # the bell rings already
                pass
            break
        return 0

    # Asking

    cdef _ask(self, InferenceRequestBase request, list left):
        cdef list arrays = [], released = []
        cdef uint64_t size = 0
        cdef bint waits = False
        block = number = None
        try:
            if self._lay_out(request, arrays, &size):
                waits = True
                block = self._blocks.allocate(size)
                waits = False
                number = self._write(block, arrays, size, released)
        except Exception as error:
            # Python's form meets the same, or tells why there is no memory. A signal handler may have raised.
            if waits and not isinstance(error, OutOfMemory):
                raise
        if number is None:
            self._undo(block, released)
            return NotImplemented
        if len(self._queued) == 0 and self._send():
            return self._receive(number, request, left)
        # Python sends it then. The runtime is behind with reading, or gone.
        try:
            packet = PyBytes_FromStringAndSize(self._message.bytes().data(), self._message.bytes().size())
            self._leave(number, request, left)
            self._queued.append(packet)
        except BaseException:
            del left[:]
            self._open.pop(number, None)
            self._undo(block, released)
            raise
        return None

    cdef bint _lay_out(self, InferenceRequestBase request, list arrays, uint64_t* size) except -1:
        """Say where each input lies in a block, and write all of INFER but what is known later.

        Returns False for a request that Python has to send.
        """
        cdef int64_t version
        cdef string_view text
        if not _text_of(<PyObject*>request._model_name, &text):
            return False
        if not is_small_int(<PyObject*>request._model_version, &version) or version < -1:
            return False
        self._head.clear()
        self._head.text(text)
        self._head.integer(version)
        self._head.flag(False)
        self._head.uint(0)
        self._placed.clear()
        self._dims.clear()
        self._tail.clear()
        inputs, names = _list_in(<PyObject*>request._inputs), _list_in(<PyObject*>request._requested_output_names)
        if not inputs or names is None:
            return False
        self._tail.array(len(<list>inputs))
        for tensor in <list>inputs:
            if not self._lay_out_input(tensor, arrays, size):
                return False
        self._tail.array(len(<list>names))
        for name in <list>names:
            if not _text_of(<PyObject*>name, &text):
                return False
            self._tail.text(text)
        self._tail.nil()
        return self._tail.bytes().size() <= kMaxPacketBytes

    cdef bint _lay_out_input(self, tensor, list arrays, uint64_t* size) except -1:
        """Do so with one input. Returns False if it is no small array."""
        cdef Output output
        cdef string_view name
        if not is_tensor(tensor) or not _text_of(<PyObject*>(<TensorBase>tensor)._name, &name):
            return False
        array = array_of(<TensorBase>tensor, &output, &self._dims)
        if array is None or output.size > MOST_BYTES:
            return False
        output.index, output.offset = 0, size[0]
        self._placed.push_back(output)
        arrays.append(array)
        write_tensor(self._tail, name, output.datatype, self._dims.data() + output.first_dim, output.dims, 0,
                     output.offset, output.size)
        size[0] += (output.size + kAlignment - 1) // kAlignment * kAlignment
        # It does not fit into a packet, or takes so long to copy that other threads should run.
        return self._tail.bytes().size() <= kMaxPacketBytes and size[0] <= MOST_COPIED_BYTES

    cdef _write(self, block, list arrays, uint64_t size, list released):
        """Copy the inputs, and write INFER. Returns the number of the call, None if Python has to send it."""
        cdef Writer* message = &self._message
        cdef Block place = self._blocks.fill(block, arrays, self._placed, None, size, None, 0)
        if not self._take(released):
            return None
        number = next(self._numbers)
        message.clear()
        message.array(11)
        message.uint(_INFER)
        message.uint(number)
        message.values(self._head.bytes())
        message.array(len(released))
        for region, offset in released:
            message.array(2)
            message.uint(region)
            message.uint(offset)
        message.array(1)
        message.array(3)
        message.uint(place.region)
        message.uint(place.offset)
        message.uint(place.size)
        message.values(self._tail.bytes())
        return number if message.bytes().size() <= kMaxPacketBytes else None

    cdef bint _take(self, list released) except -1:
        """Take the places that the model has dropped. Returns False if they are too many."""
        cdef Py_ssize_t left = len(self._released)
        if left > MOST_RELEASED:
            return False
        try:
            while left > 0:
                left -= 1
                released.append(self._take_released())
        except IndexError:  # another thread took the last one
            pass
        return True

    cdef int _undo(self, block, list released) except -1:
        """Give back what was taken for an INFER that was not sent."""
        self._released.extend(released)
        return 0 if block is None else self._blocks.give_back(block)

    cdef bint _send(self) except -1:
        """Hand INFER to the kernel. Returns False if that would not be at once."""
        cdef string_view said = self._message.bytes()
        return c_send(self._fileno(), said.data(), said.size(), MSG_DONTWAIT | MSG_NOSIGNAL) == <ssize_t>said.size()

    cdef int _leave(self, number, request, list left) except -1:
        """Open a call in Python, and add it to `left`: its answer comes there."""
        call = object.__new__(self._call_type)
        for name, value in self._of_a_call:
            setattr(call, name, value)
        call.number, call.keeps, call.inbox = number, request, type(call.inbox)()
        left.append(call)
        self._open[number] = call
        return 0

    # Waiting

    cdef _receive(self, number, request, list left):
        """Wait for the reply. If that cannot be done here, or the thread leaves, the call stays in `left`."""
        cdef ssize_t size = -1
        cdef int fd, error
        if len(self._inbox):
            self._leave(number, request, left)
            return None
        while size < 0:
            # Each time: a signal handler may have closed the channel.
            fd = self._fileno()
            with nogil:
                size = c_recv(fd, self._packet, ROOM, 0)
                error = errno
            if size < 0:
                if error != EINTR:
                    # The channel meets the same error.
                    self._leave(number, request, left)
                    return None
                try:
                    PyErr_CheckSignals()
                except BaseException:
                    self._leave(number, request, left)
                    raise
        response = None
        if 0 < size and <uint64_t>size <= kMaxPacketBytes:
            try:
                response = self._read(number, size)
            except Exception:
                pass  # Python's form meets the same
        if response is not None:
            return response
        try:
            self._inbox.append(PyBytes_FromStringAndSize(self._packet, size))
        except BaseException:
            # The packet is lost, and a thread waits for it.
            self._end_process()
            raise
        self._leave(number, request, left)
        return None

    cdef _read(self, uint64_t number, size_t size):
        """Make the response of a reply to this call. Returns None, having done nothing, for any other packet."""
        cdef PlainReply* said = &self._reply
        cdef list leases = [], places = [], outputs = [], released = []
        cdef NamedLayout each
        cdef size_t i
        if not said.read(string_view(self._packet, size)) or said.call != number:
            return None
        for i in range(said.blocks.size()):
            # One of this stub's own, or one that has not come yet, is left to Python.
            if not add_lease(self._request_regions, said.blocks[i], leases, places, None):
                return None
        for i in range(said.tensors.size()):
            each = said.tensors[i]
            name = PyUnicode_DecodeUTF8(each.name.data(), each.name.size(), NULL)
            outputs.append(tensor_over(name, each.datatype, said.shape(each), each.dims, each.offset, each.size,
                                       leases[each.block]))
        for i in range(said.released.size()):
            released.append((said.released[i].region, said.released[i].offset))
        response = response_of(outputs)
        if released:
            self._regions.returned.extend(released)
        # From here on nothing fails.
        for lease in leases:
            lease.give_back = self._give_back
        return response


cdef bint _text_of(PyObject* found, string_view* text) except -1:
    """Get the text of a string, which keeps it as long as it lives. Returns False for anything else."""
    cdef Py_ssize_t size
    cdef const char* data
    # No code of the model's runs for a string of Python's own class.
    if found == NULL or type(<object>found) is not str:
        return False
    data = PyUnicode_AsUTF8AndSize(found, &size)
    text[0] = string_view(data, size)
    return True


cdef _list_in(PyObject* found):
    """Return the list that an attribute holds, None if it is none."""
    return <object>found if found != NULL and type(<object>found) is list else None
