# The types of a dispatcher, for the compiled form of `dispatcher.py`.
cimport cython

from moonpool.ipc.port._calls cimport CallPort as PortType
from moonpool.ipc.port._port cimport ExecutingBatch as RepliesType, RequestBase as RequestType
from moonpool.runtime.stubs._control cimport MessageRateLimiter as LimiterType
from moonpool.runtime.stubs.calls._requests cimport ModelCall as CallType

# Found without a look into the module's dictionary.
cdef object COSTS, MAX_CALLS, ModelCall, MoonpoolError, PeerGone, RemoteProtocolError, Response, USUAL_CALL_COST
cdef object make_call_request, read_inputs


cdef class CallDispatcher:
    cdef object __weakref__
    cdef public object _channel, _link, _reactor, _models, _metrics, _codec, _fetching
    cdef public LimiterType _rate_limiter
    cdef public PortType _port
    cdef public RepliesType _replies
    cdef public object _kill, _catch_up, _log
    cdef public StubSendQueue _send_queue
    cdef public CopyBudget _requests_budget, _loads_budget
    cdef public dict _calls, _handlers
    cdef public set _tasks, _questions
    cdef public long long _stored_bytes
    cdef public bint _is_contained, _takes_devices

    cpdef _ready(self)
    cpdef _take(self, bytes packet)
    cpdef _handle(self, list fields)
    @cython.locals(call=CallType)
    cpdef _infer(self, list fields)
    @cython.locals(request=RequestType)
    cpdef _submit(self, CallType call, list fields, hosted, inputs)
    cpdef _answer(self, CallType call, outcome, bint is_last)
    cpdef _reply(self, CallType call, outcome, bint is_last)
    cpdef bint _is_open(self, CallType call) except -1
    cpdef _check_new(self, number)


cdef class CopyBudget:
    cdef object _lock
    cdef dict _taken

    cpdef release(self, number)


cdef class StubSendQueue:
    cdef object _channel, _lock, _reactor, _waiting
    cdef PortType _port
    cdef long long _waiting_bytes

    cpdef put(self, packet)
    cpdef flush(self)
