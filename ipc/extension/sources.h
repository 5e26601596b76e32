// What every extension has: Python by its limited API, the checksum of the sources, and frames that may be unwound.
#pragma once

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "unwinding.h"

namespace moonpool::python {

// Adds the checksum of the sources, by which `moonpool.ipc.extension` knows an extension that is older than they are.
// Whoever compiles an extension passes it. Returns -1 with an error set, else 0.
inline int add_sources(PyObject* module) { return PyModule_AddStringConstant(module, "SOURCES", MOONPOOL_SOURCES); }

}  // namespace moonpool::python
