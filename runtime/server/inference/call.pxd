# The types of calls for inference, for the compiled form of `call.py`.
cimport cython

from moonpool.ipc.port._port cimport RequestBase as RequestType
cimport moonpool.runtime.schedule._event_loop as event_loop
from moonpool.runtime.schedule._event_loop cimport LoopDriver as DriverType


cdef class Inference:
    cdef object __weakref__
    cdef public object service, loop, executor
    cdef public DriverType driver


cdef class InferCall(event_loop.LoopWaiter):
    cdef public object hosted, plan, trace
    cdef public Inference _inference
    cdef public RequestType _request
    cdef public bint _is_over

    cpdef belong(self, Inference inference)
    cpdef settle(self, outcome)
    cdef bint _takes_long(self, response) except -1
    cpdef is_settled(self)
    cdef _release(self)
