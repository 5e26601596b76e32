# The types of RPCs, for the compiled form of `call.py`.
cimport cython

from moonpool.runtime.server._meter cimport Meter as MeterType


cdef class GrpcCall:
    cdef object __weakref__
    cdef public OpenCalls _calls
    cdef public object method, metadata, _on_drain, _on_gone, _timer
    cdef public long long begun_ns, received_ns
    cdef public bint _is_gone, _is_over

    cpdef begin(self, OpenCalls calls, method, metadata, timeout_s)
    cpdef _put(self, message, status, sent)
    @cython.locals(meter=MeterType)
    cdef _end(self, code)


cdef class OpenCalls:
    cdef object __weakref__
    cdef public object loop
    cdef public MeterType meter
    cdef public set open
    cdef object _methods, _restriction, _emptied
    cdef Py_ssize_t _most

    cpdef begin(self, GrpcCall call)
    cpdef ended(self, GrpcCall call)
