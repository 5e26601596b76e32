# The types of a reactor, for the compiled form of `reactor.py`.

# Found without a look into the module's dictionary.
cdef object get_ident, monotonic


cdef class Reactor:
    cdef object __weakref__
    cdef public object _thread, _ident, _numbers, _ends, _wake_fd, soon
    cdef public Poller _epoll
    cdef public Timer _timer
    cdef public dict _readers, _once, _paused
    cdef public set _armed, _writers
    cdef public list _later
    cdef public bint _running, has_ended

    cpdef arm(self, fd, callback)
    cpdef _run_soon(self)
    cpdef _run_due(self)


cdef class Poller:
    cdef public object _epoll
    cdef public dict _beyond

    cpdef modify(self, fd, events)


cdef class Timer:
    cdef public object _libc, _fd, _when

    cpdef set(self, when)
