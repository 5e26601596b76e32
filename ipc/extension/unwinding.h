// Makes frames of ours like frames of C for a thread that the interpreter ends.
//
// Theory of operation. A daemon thread may wait for the interpreter's lock inside a function while the program ends.
// CPython up to 3.13 then calls `pthread_exit`, and the C library unwinds the thread's stack. The destructors in our
// frames would drop references and give locks back without the interpreter's lock, while the main thread takes
// everything down, and a frame that is `noexcept` would abort the process. Nothing of a frame of C runs at that time,
// so nothing of ours may.
//
// The unwinder asks the personality routine of each frame what to run there. The linker sends its questions here first
// (`--wrap` in setup.py). An unwinding that no exception of C++ has begun finds nothing to run, and goes on to the next
// frame. Exceptions go the usual way.
#pragma once

#include <unwind.h>

extern "C" {

_Unwind_Reason_Code __real___gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class, _Unwind_Exception*,
                                                _Unwind_Context*);

// The tables of all frames refer to it.
[[gnu::used]] inline _Unwind_Reason_Code __wrap___gxx_personality_v0(int version, _Unwind_Action actions,
                                                                     _Unwind_Exception_Class kind,
                                                                     _Unwind_Exception* exception,
                                                                     _Unwind_Context* context) {
  if (actions & _UA_FORCE_UNWIND) return _URC_CONTINUE_UNWIND;
  return __real___gxx_personality_v0(version, actions, kind, exception, context);
}

// The C++ library writes the type of an exception that nobody catches, and would bring 190 kB to write it well.
[[gnu::used]] inline char* __wrap___cxa_demangle(const char*, char*, unsigned long*, int* status) {
  if (status) *status = -1;
  return nullptr;
}
}
