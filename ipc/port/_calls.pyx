# distutils: language = c++
# cython: language_level=3, binding=False, annotation_typing=False
# cython: boundscheck=True, wraparound=True, nonecheck=True, overflowcheck=True
"""The compiled form of `calls.py`, which says what everything here is for. Both give the same.

No signal handler runs inside a method, except where it calls Python's code, as comments say.
"""

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.errno cimport EAGAIN, errno
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy
from libcpp cimport bool as flag
from libcpp.vector cimport vector

from moonpool.ipc.port._port cimport (
    MSG_DONTWAIT, MSG_NOSIGNAL, Array, Block, Writer, add_sources, block_bytes, bytes_of, c_recv, c_send, fields,
    find_table, is_array, is_view, kAlignment, kContiguous, kItemBytes, kMaxPacketBytes, kReply, lease_on, string_view,
    view,
)

import sys

import numpy as np

from moonpool.ipc.codec import pack, unpack
from moonpool.ipc.errors import Closed, RemoteProtocolError
from moonpool.ipc.memory import SHARED_BYTES
from moonpool.ipc.messages import Kind
from moonpool.ipc.tensors import BYTES, DTYPES

cdef extern from *:
    # Of Python's limited API, where cpython.unicode has macros.
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*) except NULL
    object PyUnicode_DecodeUTF8(const char*, Py_ssize_t, const char*)

add_sources(sys.modules[__name__])
find_table(np.ones((2, 3), np.float32))

cdef object _ndarray = np.ndarray
cdef object _empty = np.empty
cdef object _u1 = np.dtype(np.uint8)
cdef object _INFER = int(Kind.INFER)
cdef uint64_t _BYTES = BYTES
cdef uint64_t _SHARED_BYTES = SHARED_BYTES
# By datatype; None for strings and for BF16, which are viewed as bytes.
cdef list _descrs = [DTYPES[code] if 0 < code < BYTES else None for code in range(15)]
cdef enum:
    # As in `Channel`: a longer packet is recognized by one byte more.
    ROOM = 32769
    # A copy from this size on takes so long that others should have the interpreter meanwhile.
    LONG_COPY_BYTES = 262144
    # What fits into a packet beside a small response, with the bytes that each takes at most, and those of all else
    # but the outputs. More go with the next message.
    MOST_RELEASED = 256
    RELEASED_BYTES = 19
    HEAD_BYTES = 64

# A packet is an object before anybody else has the interpreter.
cdef char[ROOM] _room


# For tests: a method that always declines would pass all others.
cdef struct Counts:
    uint64_t read, reply, send

cdef Counts _counts


def counts():
    """Return how often each method did its work."""
    return dict(_counts)


cdef class CallPort:
    """The runtime's end of a calls channel."""

    def __init__(self, channel, blocks, released, regions, wire_tensor, *, is_plain=True):
        self._channel, self._inbox, self._fileno = channel, channel.inbox, channel.descriptor
        self._blocks, self._regions, self._released = blocks, regions, released
        self._release, self._wire_tensor = released.append, wire_tensor
        self.is_plain = is_plain

    cpdef receive(self):
        """Return the next packet, None if there is none yet. Never blocks. Raises `PeerGone`, `RemoteProtocolError`."""
        cdef int fd = -1 if not self.is_plain or len(self._inbox) else self._fileno()
        cdef ssize_t size
        if fd < 0:
            return self._channel.receive_ready()
        size = c_recv(fd, _room, ROOM, MSG_DONTWAIT)
        if size < 0:
            # The channel meets other errors, too, or what comes after them.
            return None if errno == EAGAIN else self._channel.receive_ready()
        try:
            packet = PyBytes_FromStringAndSize(_room, size)
        except MemoryError:
            # Nobody would wait for this packet any more, so the peer counts as gone.
            size, packet = 0, b""
        if 0 < size < ROOM:
            return packet
        self._inbox.append(packet)
        return self._channel.receive_ready()

    cpdef read(self, bytes packet):
        """Read an INFER, and do nothing. Returns its fields, with None for blocks and inputs, which `inputs` makes.

        Returns None for any other packet, and if Python has to do it.
        """
        cdef PlainCall* said = &self._said
        cdef list released = [], outputs = []
        cdef size_t i
        if not self.is_plain or not said.read(string_view(PyBytes_AsString(packet), PyBytes_Size(packet))):
            return None
        for i in range(said.blocks.size()):
            if self._region_of(said.blocks[i]) is None:
                return None
        for i in range(said.released.size()):
            released.append([said.released[i].region, said.released[i].offset])
        for i in range(said.outputs.size()):
            outputs.append(_text(said.outputs[i]))
        details = None
        if said.details.size() > 0:
            row = PyBytes_FromStringAndSize(said.details.data(), said.details.size())
            details = unpack(row, strict_map_key=True, max_ext_len=0)
        cdef list found = [
            _INFER, said.call, _text(said.model), said.version, bool(said.decoupled), said.timeout_us, released, None,
            None, outputs, details,
        ]
        self._packet = packet
        _counts.read += 1
        return found

    cpdef inputs(self):
        """Return the inputs of the INFER that was read, by name.

        They are views of its blocks, which the runtime has from now on.
        """
        cdef PlainCall* said = &self._said
        cdef list leases = []
        cdef dict inputs = {}
        cdef NamedLayout each
        cdef size_t i
        cdef int64_t size
        cdef char* at
        for i in range(said.blocks.size()):
            region = self._region_of(said.blocks[i])
            # Where Python's code runs, another thread may close it.
            buffer = None if region is None else region.buffer
            if buffer is None:
                raise Closed("the memory of the stub was closed")
            leases.append(lease_on(region, buffer, said.blocks[i], self._release))
        for i in range(said.tensors.size()):
            each = said.tensors[i]
            lease = leases[each.block]
            at = fields(lease).data + each.offset
            if each.datatype >= _BYTES:
                size = each.size
                raw = view(_ndarray, _u1, 1, &size, at, 1, lease)
                array = tuple.__new__(self._wire_tensor, (each.datatype, _shape(said.shape(each), each.dims), raw))
            elif each.size == 0:
                array = _empty(_shape(said.shape(each), each.dims), _descrs[each.datatype])
            else:
                array = view(_ndarray, _descrs[each.datatype], each.dims, said.shape(each), at,
                             kItemBytes[each.datatype], lease)
            inputs[_text(each.name)] = array
        self._packet = None
        return inputs

    cdef _region_of(self, Block block):
        """Return the region of the stub's own that a block lies in, or None if it lies elsewhere."""
        region = (<dict?>self._regions).get(block.region)
        # No number has more than 63 bits.
        if region is None or block.offset + block.size > <uint64_t>region.size_bytes:
            return None
        return region

    cpdef reply(self, uint64_t number, bint is_last, response):
        """Copy the outputs of a response into a block that the stub borrows. Returns the packet of REPLY.

        Returns None, having done nothing, if Python has to do it.
        """
        cdef Writer rest, message
        cdef vector[Copied] copied
        cdef list raws = [], taken = []
        cdef uint64_t size = 0
        if not self.is_plain:
            return None
        try:
            if not self._place(response, &rest, &copied, raws, &size):
                return None
            block = self._take_block(size) if raws else None
        except Exception:
            return None  # Python's form meets the same
        try:
            if block is not None and not self._copy(raws, copied, block):
                self._undo(block, taken)
                return None
            self._take_released(taken)
            message.array(8)
            message.uint(kReply)
            message.uint(number)
            message.flag(is_last)
            message.array(len(taken))
            for region, offset in taken:
                message.array(2)
                message.uint(region)
                message.uint(offset)
            message.array(0 if block is None else 1)
            if block is not None:
                message.array(3)
                message.uint(block.region.id)
                message.uint(block.offset)
                message.uint(size)
            message.values(rest.bytes())
            packet = PyBytes_FromStringAndSize(message.bytes().data(), message.bytes().size())
        except BaseException:
            self._undo(block, taken)
            raise
        _counts.reply += 1
        return packet

    cdef bint _place(self, response, Writer* rest, vector[Copied]* copied, list raws, uint64_t* size) except -1:
        """Say where each output lies in a block, and write the fields of REPLY behind the blocks.

        Returns False if Python has to do it. Python's code runs for parameters alone.
        """
        cdef Copied each
        outputs, parameters = response.outputs, response.parameters
        if type(outputs) is not dict:
            return False
        rest.array(len(<dict>outputs))
        for name, output in (<dict>outputs).items():
            if is_array(output):
                shape, raw = None, output
                each.datatype = _datatype_of(raw)
            elif type(output) is self._wire_tensor:
                datatype, shape, raw = <tuple>output
                each.datatype = datatype
                if type(shape) is not tuple or not is_array(raw):
                    return False
            else:
                return False
            if not _sees(raw, &each.size) or each.datatype == 0 or each.size >= _SHARED_BYTES or is_view(raw):
                return False
            each.offset = size[0]
            size[0] += (each.size + kAlignment - 1) // kAlignment * kAlignment
            if size[0] >= LONG_COPY_BYTES:
                return False
            self._write(rest, name, shape, raw, &each)
            copied.push_back(each)
            raws.append(raw)
        if type(parameters) is dict and not parameters:
            rest.nil()
        else:
            # A backend may answer with any mapping.
            row = pack(dict(parameters) or None)
            rest.values(string_view(PyBytes_AsString(row), PyBytes_Size(row)))
        rest.nil()
        return rest.bytes().size() + MOST_RELEASED * RELEASED_BYTES + HEAD_BYTES <= kMaxPacketBytes

    cdef int _write(self, Writer* rest, name, shape, raw, Copied* each) except -1:
        """Write the row of an output."""
        cdef Py_ssize_t length
        cdef const char* text = PyUnicode_AsUTF8AndSize(<str?>name, &length)
        cdef Array* seen = fields(raw)
        cdef int k
        rest.array(6)
        rest.text(string_view(text, length))
        rest.uint(each.datatype)
        if shape is None:
            rest.array(seen.nd)
            for k in range(seen.nd):
                rest.uint(seen.dims[k])
        else:
            rest.array(len(<tuple>shape))
            for dim in <tuple>shape:
                rest.uint(dim)
        rest.uint(0)
        rest.uint(each.offset)
        rest.uint(each.size)
        return 0

    cdef _take_block(self, uint64_t size):
        """Lend a block that was given back, or have Python allocate one. Python's code runs."""
        block = self._blocks.lend_spare(block_bytes(size))
        return self._blocks.allocate(size, keep=True) if block is None else block

    cdef bint _copy(self, list raws, const vector[Copied]& copied, block) except -1:
        """Copy the outputs into the block. Returns False for arrays that are not as they were when they were placed."""
        cdef Py_buffer memory
        cdef int64_t start = block.offset, room = block.size_bytes
        cdef uint64_t size
        cdef size_t i
        cdef char* to
        buffer = block.region.buffer
        if buffer is None:
            return False
        PyObject_GetBuffer(buffer, &memory, PyBUF_WRITABLE)
        try:
            if start < 0 or room < 0 or start > memory.len - room:
                return False
            to = <char*>memory.buf + start
            for i in range(copied.size()):
                # Python's code has run since.
                if not _sees(raws[i], &size) or size != copied[i].size or copied[i].offset + size > <uint64_t>room:
                    return False
                memcpy(to + copied[i].offset, fields(raws[i]).data, size)
            return True
        finally:
            PyBuffer_Release(&memory)

    cdef int _take_released(self, list taken) except -1:
        """Take the places that callers have dropped. They must not be lost."""
        cdef Py_ssize_t left = min(len(self._released), MOST_RELEASED)
        popleft = self._released.popleft
        while left > 0:
            left -= 1
            try:
                taken.append(popleft())
            except IndexError:  # another thread took the last one
                return 0
        return 0

    cdef int _undo(self, block, list taken) except -1:
        """Make it as if nothing had happened. Keeps the error that is being handled."""
        self._released.extend(taken)
        if block is not None:
            try:
                self._blocks.take_back([(block.region.id, block.offset)])
            except RemoteProtocolError:
                pass  # the stub is gone by now, and borrows nothing any more
        return 0

    cpdef bint send(self, bytes packet) except -1:
        """Send a packet. Never blocks. Returns False, having done nothing, if Python has to do it."""
        cdef int fd = self._fileno() if self.is_plain else -1
        cdef Py_ssize_t size = PyBytes_Size(packet)
        if fd < 0 or c_send(fd, PyBytes_AsString(packet), size, MSG_DONTWAIT | MSG_NOSIGNAL) != size:
            return False  # Python's form meets the same
        _counts.send += 1
        return True


cdef _text(const string_view& text):
    """Return a text, which is UTF-8."""
    return PyUnicode_DecodeUTF8(text.data(), text.size(), NULL)


cdef tuple _shape(const int64_t* dims, uint64_t count):
    return tuple([dims[k] for k in range(count)])


cdef uint64_t _datatype_of(array) except? 0:
    """Return the datatype of an array by its dtype, 0 for those that cannot just be copied."""
    cdef PyObject* descr = <PyObject*>fields(array).descr
    cdef uint64_t code
    for code in range(1, _BYTES):
        if <PyObject*>_descrs[code] is descr:
            return code
    return 0


cdef bint _sees(array, uint64_t* size) except -1:
    """Get the bytes of an array.

    Returns False if they do not lie in one piece, or if it has a dtype that none here is.
    """
    cdef uint64_t datatype
    if not is_array(array) or not (fields(array).flags & kContiguous):
        return False
    datatype = _datatype_of(array)
    if datatype == 0:
        return False
    size[0] = bytes_of(array, kItemBytes[datatype])
    return True
