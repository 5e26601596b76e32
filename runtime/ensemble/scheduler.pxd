# The types of the runs of an ensemble, for the compiled form of `scheduler.py`.
cimport cython

from moonpool.ipc.port._port cimport RequestBase as RequestType
from moonpool.runtime.observe._statistics cimport Statistics as StatisticsType
from moonpool.runtime.schedule._lane cimport Lane as LaneType

# Found without a look into the module's dictionary.
cdef object ChainRun, bisect_left, monotonic_ns, time_ns


@cython.final
cdef class OpenRuns:
    cdef LaneType _lane
    cdef object _resolve
    cdef public dict by_request

    @cython.locals(lane=LaneType)
    cpdef add(self, run)
    @cython.locals(lane=LaneType, request=RequestType)
    cpdef ended(self, run, outcome)


@cython.locals(rows=cython.longlong, taken_ns=cython.longlong)
cdef _count(StatisticsType statistics, RequestType request, list durations_ns, outcome, long long now_ns)
cdef long long _now_ms() except -1
