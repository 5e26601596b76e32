# The types of a run of a chain, for the compiled form of `chain.py`.
cimport cython

from moonpool.ipc.port._port cimport RequestBase as RequestType
from moonpool.runtime.ensemble._members cimport StepModel as StepModelType
from moonpool.runtime.schedule._lane cimport ThreadWaiter as ThreadType

# Found without a look into the module's dictionary.
cdef object Response, SequencedTensor, _SUBMITTED, _ndarray, is_interruptible


@cython.final
cdef class ChainRun:
    cdef object __weakref__
    cdef public object _owner, _flow, _chain, _output, _scheduler
    cdef public RequestType request, _request
    cdef public list _turn, durations_ns
    cdef public Py_ssize_t _at
    cdef public bint interruptible, is_over

    cpdef begin(self)
    cpdef _follow(self, outcome)
    cdef bint _goes_on_here(self) except -1
    cdef _took(self, outcome)
    cdef bint _broke(self, error) except -1
    @cython.locals(member=StepModelType)
    cdef _submit(self, value)
    @cython.locals(request=RequestType)
    cdef _send(self, StepModelType member, inputs, sequence)
    cdef _offer(self, execution)
    cdef _deliver(self, value)
    cpdef fail(self, error)
    cpdef bint stop(self, driver=*) except -1
    cdef _leave(self, driver)
    @cython.locals(thread=ThreadType)
    cpdef bint appoint(self, execution) except -1
    cpdef resolve(self, outcome)
