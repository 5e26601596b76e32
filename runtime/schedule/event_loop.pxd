# The types of callers in event loops, for the compiled form of `event_loop.py`.
cimport cython

from moonpool.ipc.port._port cimport RequestBase as RequestType
from moonpool.runtime.schedule._lane cimport Execution as ExecutionType


@cython.final
cdef class WatchedSocket:
    cdef object _descriptor, _poll
    cdef public object link
    cdef public int fd
    cdef public bint is_registered
    cdef public ExecutionType execution

    cdef bint is_readable(self) except -1
    cdef close(self)


@cython.final
cdef class WatchedSockets:
    cdef public object epoll
    cdef dict _by_link, _by_fd

    @cython.locals(watched=WatchedSocket)
    cdef WatchedSocket of(self, link)
    cdef WatchedSocket find(self, int fd)
    cdef forget(self, WatchedSocket watched)
    cpdef list all(self)
    @cython.locals(watched=WatchedSocket)
    cdef list close(self)


cdef class LoopDriver:
    cdef object __weakref__
    cdef object _loop, _calls, _bell
    cdef public WatchedSockets _sockets
    cdef set _awaited
    cdef dict _gathered
    cdef Py_ssize_t _width
    cdef public bint is_interruptible
    cdef bint _is_ringing, _is_watching

    cpdef watch(self)
    @cython.locals(execution=ExecutionType)
    cpdef submit(self, scheduler, RequestType request)
    cpdef bint gather(self, scheduler, request) except -1
    @cython.locals(watched=WatchedSocket)
    cpdef drive(self, ExecutionType execution)
    @cython.locals(execution=ExecutionType)
    cdef bint _take(self, WatchedSocket watched, bint is_here=*) except -1
    @cython.locals(watched=WatchedSocket)
    cpdef _look(self)
    @cython.locals(watched=WatchedSocket, execution=ExecutionType)
    cpdef hand_over(self, request)
    @cython.locals(execution=ExecutionType)
    cpdef close(self)


cdef class LoopWaiter:
    cdef object __weakref__
    cdef public object _loop
    cdef public LoopDriver driver

    cpdef settle(self, outcome)
    cpdef is_settled(self)
    cdef bint _is_here(self) except -1
    cpdef resolve(self, outcome)
    cpdef bint appoint(self, ExecutionType execution) except -1
    cpdef submit(self, scheduler, RequestType request)
    cpdef leave(self, scheduler, request)


cpdef driver_of(loop)
