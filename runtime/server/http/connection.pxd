# The types of connections over HTTP, for the compiled form of `connection.py`.
cimport cython

from moonpool.runtime.server._meter cimport Meter as MeterType
from moonpool.runtime.server.http._head cimport Head as HeadType, Heads as HeadsType


cdef class HttpExchange:
    cdef object __weakref__
    cdef object _begun_ns
    cdef HttpConnection _connection
    cdef public object body, cancel, ended, own_headers, text
    cdef public HeadType head
    cdef bytes _held
    cdef public bint has_failed, is_gone
    cdef public long long received_ns, _length
    cdef public int status


cdef class HttpConnection:
    cdef object __weakref__
    cdef public HttpPort _port
    cdef public object _transport
    cdef public bytes _waiting
    cdef HeadType _head
    cdef object _parser, _intake, _drained, _stalled_since
    cdef HttpExchange _exchange
    cdef Py_ssize_t _fed_bytes, _awaited_bytes, _unsent_bytes
    cdef long long _begun_ns
    cdef public bint _is_paused
    cdef bint _is_reading, _is_lingering
    cdef public bint closes
    cdef public double since

    cdef _take(self, bytes data)
    cdef _hold(self, bytes data)
    cdef _take_more(self)
    cdef bint _hold_place(self) except -1
    cdef _read(self, bytes data)
    @cython.locals(head=HeadType)
    cdef bytes _read_head(self, bytes data)
    cdef _begin_head(self, bytes data)
    cdef _feed(self, bytes data)
    cdef _begin_body(self, HeadType head)
    cdef _refusal(self, head, most_bytes)
    cdef _end_intake(self)
    cdef bytes _read_body(self, intake, bytes data)
    cdef _hand_over(self, HeadType head, body, begun_ns=*, text=*)
    cdef bytes disposition(self, HeadType head)
    cdef write(self, data)
    cdef write_parts(self, parts)
    cdef end(self, HttpExchange exchange)
    cdef _refuse(self, error)
    cpdef abort(self)
    cdef _since_now(self)


@cython.locals(pieces=list)
cdef list _head(int status, tuple headers, length, bytes disposition, tuple own)
cdef _add_lines(list pieces, tuple headers)


cdef class HttpPort:
    cdef object __weakref__
    cdef public object loop, watches, writing, handler, limits, clients, buffer
    cdef public MeterType meter
    cdef public HeadsType heads
    cdef public double handshake_timeout_s, now
    cdef public Py_ssize_t awaited_bytes
    cdef object _looking
    cdef double _look_s

    cdef answered(self, HttpExchange exchange, int status)
