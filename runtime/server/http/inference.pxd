# The types of the route for inference, for the compiled form of `inference.py`.
cimport cython
cimport moonpool.runtime.server.inference._call as call

from moonpool.runtime.server.http._connection cimport HttpExchange as ExchangeType
from moonpool.runtime.server.inference._call cimport InferCall as CallType


@cython.final
cdef class InferTarget:
    cdef public object model, version, encoding, accepts, load_form
    cdef public bint is_json
    cdef object _plan
    cdef bytes _text

    @cython.locals(raw=bytes)
    cpdef plan(self, text)


cdef class HttpInference(call.Inference):
    cdef public object limits, turns
    cdef object _tasks

    cpdef find(self, model, version)
    cpdef handle(self, ExchangeType exchange, InferTarget target)


@cython.final
cdef class HttpInferCall(call.InferCall):
    cdef ExchangeType _exchange
    cdef InferTarget _target

    cdef _read_parts(self, text, data, offset, is_shared)
    cdef _respond(self, headers, parts)
