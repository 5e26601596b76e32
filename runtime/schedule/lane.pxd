# The types of a lane, for the compiled form of `lane.py`.
cimport cython

from moonpool.ipc.port._port cimport RequestBase as RequestType, LaneEnd as PortType
from moonpool.runtime.observe._statistics cimport Statistics as StatisticsType
from moonpool.runtime.model._backend cimport ModelInstance as InstanceType
from moonpool.runtime.schedule._request_queue cimport RequestQueue as QueueType

# Found without a look into the module's dictionary.
cdef object LONGEST_S, allocate_lock, bisect_left, check_timeout, get_ident, monotonic, monotonic_ns, time_ns


cdef class Lane:
    cdef object __weakref__
    cdef public object name, reactor, note, wanted, pace_ns
    cdef public object permits, _lock, _acquire, _release, _changed, _departures, _refusal, _wake_at_ns
    cdef public QueueType _queue
    cdef public StatisticsType statistics
    cdef public list _idle
    cdef public set _taken
    cdef public dict _busy
    cdef public bint is_atomic, _decoupled, _is_in_order, _is_plain

    @cython.locals(waiter=ThreadWaiter)
    cpdef infer(self, RequestType request, timeout_s=*)
    cpdef enter(self, RequestType request)
    @cython.locals(idle=list, queue=QueueType, now_ns=cython.longlong, execution=Execution, instance=InstanceType,
                   is_free=cython.bint)
    cpdef submit(self, RequestType request)
    cpdef _let_wait(self, RequestType request, long long now_ns)
    cpdef tuple _form(self, long long now_ns)
    @cython.locals(started=list, queue=QueueType, instance=InstanceType, place=cython.Py_ssize_t)
    cpdef tuple _form_in(self, idle, long long now_ns)
    @cython.locals(execution=Execution, request=RequestType, responded_ns=cython.longlong)
    cdef Execution _start(self, InstanceType instance, list batch, long long now_ns, driver)
    @cython.locals(execution=Execution)
    cpdef _launch(self, list executions, list rejected, mine)
    cdef bint _start_mine(self, Execution execution, RequestType mine) except -1
    @cython.locals(port=PortType)
    cpdef bint _send(self, Execution execution, mine) except -1
    @cython.locals(answered_ns=cython.longlong)
    cpdef finish(self, Execution execution, bint interruptible=*)
    @cython.locals(now_ns=cython.longlong, requests=list, queue=QueueType, started=list, rejected=list, steps=list,
                   instance=InstanceType)
    cpdef settle(self, Execution execution, answers, long long answered_ns=*, bint interruptible=*)
    @cython.locals(request=RequestType, instance=InstanceType)
    cdef bint _settles_here(self, Execution execution) except -1
    @cython.locals(request=RequestType, i=cython.Py_ssize_t, thread=ThreadWaiter)
    cpdef _tell(self, list requests, answers, resolved)
    cpdef keep_pace(self, Execution execution)
    cpdef bint executes(self, Execution execution)


@cython.final
cdef class Execution:
    cdef public Lane scheduler
    cdef public InstanceType instance
    cdef public object pending, answers
    cdef public PortType port
    cdef public list requests, _drivers
    cdef public long long started_ns, sent_ns
    cdef public bint is_sent, is_lost, has_deferred, has_traces

    cpdef begin(self, Lane scheduler, InstanceType instance, list requests, long long started_ns, driver)
    @cython.locals(request=RequestType)
    cpdef sent(self, pending, PortType port=*)
    cpdef bint claim(self, by) except -1
    cpdef offer(self)
    @cython.locals(request=RequestType, thread=ThreadWaiter)
    cpdef appoint(self)
    cpdef reserve(self, by)
    @cython.locals(port=PortType, is_alone=cython.bint)
    cpdef drive(self, deadline, bint interruptible)
    @cython.locals(port=PortType)
    cdef bint _took_until(self, double deadline, bint is_alone) except -1
    @cython.locals(
        requests=list, statistics=StatisticsType, by_duration=list, request=RequestType, now_ms=cython.longlong,
        good=cython.longlong, rows=cython.longlong, total_rows=cython.longlong, success_ns=cython.longlong,
        queue_ns=cython.longlong, filled=cython.longlong, taken_ns=cython.longlong, input_ns=cython.longlong,
        output_ns=cython.longlong, infer_ns=cython.longlong, bad=cython.bint, i=cython.Py_ssize_t, sums=list,
    )
    cpdef record(self, answers, long long answered_ns, long long now_ns)


cdef class ThreadWaiter:
    cdef public object _bell, outcome
    cdef public Execution _execution
    cdef public bint _gone, _is_awake, interruptible

    cpdef resolve(self, outcome)
    cpdef bint appoint(self, Execution execution) except -1
    cdef _ring(self)
    cdef _sleep(self, deadline)
    @cython.locals(execution=Execution)
    cpdef wait(self, deadline, Execution own)


cdef class PunctualWaiter(ThreadWaiter):
    pass
