# The types of the handler of requests, for the compiled form of `handler.py`.
cimport cython

from moonpool.runtime.server.http._connection cimport HttpExchange as ExchangeType
from moonpool.runtime.server.http._head cimport Head as HeadType
from moonpool.runtime.server.http._inference cimport HttpInference as InferenceType


@cython.final
cdef class HttpHandler:
    cdef object __weakref__
    cdef bint _is_openai
    cdef InferenceType _inference
    cdef object _others, _restriction, _origins, _forwarding

    @cython.locals(head=HeadType)
    cpdef handle(self, ExchangeType exchange)
    cdef bint _asks_openai(self, head) except -1
    cdef _plan(self, HeadType head)
    cdef _make_plan(self, head)
