// Calls without a tuple of the arguments, for what Cython makes.
//
// The limited API has these functions from Python 3.12 on. CPython 3.11 exports the same functions, with the same
// meaning, so that a file for 3.11 may use them (docs/decisions/0030). setup.py tells the code that Cython makes that
// they are there.
#pragma once

#include <Python.h>

#if defined(Py_LIMITED_API) && Py_LIMITED_API < 0x030C0000
extern "C" {
typedef PyObject* (*vectorcallfunc)(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames);
PyAPI_FUNC(PyObject*) PyObject_Vectorcall(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames);
PyAPI_FUNC(PyObject*)
PyObject_VectorcallMethod(PyObject* name, PyObject* const* args, size_t nargsf, PyObject* kwnames);
PyAPI_FUNC(PyObject*) PyVectorcall_Call(PyObject* callable, PyObject* tuple, PyObject* dict);
}
#ifndef PY_VECTORCALL_ARGUMENTS_OFFSET
#define PY_VECTORCALL_ARGUMENTS_OFFSET (static_cast<size_t>(1) << (8 * sizeof(size_t) - 1))
#endif
static inline Py_ssize_t moonpool_vectorcall_nargs(size_t n) {
  return static_cast<Py_ssize_t>(n & ~PY_VECTORCALL_ARGUMENTS_OFFSET);
}
// Headers from 3.12 on declare a function of that name, which 3.11 does not export.
#define PyVectorcall_NARGS moonpool_vectorcall_nargs
#endif
