# The types of a call, for the compiled form of `requests.py`.
cimport cython

from moonpool.ipc.port._port cimport RequestBase as RequestType


cdef class ModelCall:
    cdef public object model, number, request, scheduler, _answer
    cdef public long long batch
    cdef public bint is_cancelled, takes_many

    cpdef respond(self, outcome)
    @cython.locals(request=RequestType)
    cpdef resolve(self, outcome)
