# The types of a queue, for the compiled form of `batcher.py`.
cimport cython


cdef class Level:
    cdef public object waiting, late, timeout_us
    cdef public long long number, to_instance_ns, limit
    cdef public bint may_override

    cpdef long long size(self)


@cython.final
cdef class Queue:
    cdef public object _batching
    cdef public list _preferred, _lanes, _deadlines
    cdef public dict _levels
    cdef public Level _only
    cdef public bint _is_alone, _is_planned
    cdef public long long count, _rows, _max_rows, _to_instance_ns, _delay_ns, _largest, _timed
    cdef public long long _hold_rows, _hold_until_ns
    cdef public object _hold_lane, _hold_signature

    @cython.locals(level=Level, rows=cython.longlong, deadline_ns=cython.longlong)
    cpdef add(self, request, long long now_ns, bint is_here=*)
    cpdef list expire(self, long long now_ns)
    cpdef list next_batch(self, long long now_ns)
    cpdef next_try_ns(self, bint held)
    cdef list _alone(self)
    cdef list _greedy(self)
    cdef list _planned(self, long long now_ns)


@cython.locals(queue=Queue, batches=list, batch=list)
cpdef form(queue, long long now_ns, long long idle_instances)
