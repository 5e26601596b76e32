# The types of a queue of requests, for the compiled form of `request_queue.py`.
cimport cython

from moonpool.runtime.schedule._batcher cimport Queue as QueueType


cdef class RequestQueue:
    cdef public QueueType _queue
    cdef public bint _is_open, _rejects_late, has_times, keeps_sequences
    cdef public object states

    cpdef bint lets_past(self, request)
    cpdef bint may_form(self, idle)
    cpdef add(self, request, long long now_ns)
    cpdef form(self, long long now_ns, idle)
    cpdef list take(self, long long now_ns)
