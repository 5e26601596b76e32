# The types of connections over HTTP/2, for the compiled form of `connection.py`.
cimport cython
cimport moonpool.runtime.server.grpc._call as rpc

from moonpool.runtime.server.grpc._call cimport OpenCalls as CallsType


@cython.final
cdef class Http2Call(rpc.GrpcCall):
    cdef GrpcConnection _connection
    cdef int _id
    cdef object _head, _receiver, _arrived, _placed, _sent
    cdef double _placed_at
    cdef bint _may_be_held, _has_all

    cdef coming(self, first, size_bytes)
    cpdef look(self, double now, timeout_s)
    cdef _end_placed(self)
    cdef arrived(self, data, is_compressed)
    cpdef _hand_out(self, received, data, is_compressed)
    cdef refused(self, code, size_bytes)
    cdef has_all(self)
    cpdef closed(self)
    cpdef _write(self, message, status, sent, is_packed)
    cdef has_sent(self)


cdef class GrpcConnection:
    cdef object __weakref__
    cdef object _port, _transport, _buffer, _stall
    cdef public object loop, options, session
    cdef public CallsType calls
    cdef public int level
    cdef dict _of
    cdef bint _is_busy, _is_flushing, _is_paused, _is_greeted, _is_draining, _has_tls
    cdef double _opened, _heard
    cdef object _closing_since, _too_old, _ends, _pinged, _last_ping
    cdef public Py_ssize_t idle_pings, unsent_bytes
    cdef Py_ssize_t _strikes, _awaited_bytes

    @cython.locals(call=Http2Call)
    cdef _handle(self, list events)
    cdef _tell(self, Http2Call call, tuple event)
    @cython.locals(call=Http2Call)
    cdef _begin(self, stream, raw, timeout_ns)
    cdef _ponged(self)
    cdef _count_ping(self, has_sent)
    cdef flush_soon(self)
    cpdef _flush(self)
    cdef _write(self, data)
    cdef bint may_await(self, size_bytes) except -1
    cdef count_awaited(self, more_bytes)
    cdef _close(self)
    cpdef abort(self)
