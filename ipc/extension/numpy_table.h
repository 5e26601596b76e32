// Looks into arrays of numpy, and makes them, by numpy's own table of functions.
//
// The table and the head of an array are numpy's public interface, the same in its versions 1 and 2, so one file
// serves both without numpy's headers. `np.ndarray(...)` takes four times as long. `load` compares what it sees of an
// array with what numpy says of it: where they differ, nothing here may be used.
//
// Everything here needs the interpreter's lock.
#pragma once

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace moonpool::numpy {

struct Array {
  PyObject_HEAD
  char* data;
  int nd;
  Py_ssize_t *dims, *strides;
  PyObject *base, *descr;
  int flags;
};

constexpr int kContiguous = 0x0001, kAligned = 0x0100, kWriteable = 0x0400;
// Places in the table.
constexpr size_t kArrayType = 2, kNewFromDescr = 94, kSetBaseObject = 282;

inline void** table = nullptr;
inline PyTypeObject* array_type = nullptr;

inline bool is_array(PyObject* object) { return Py_TYPE(object) == array_type; }
inline Array* fields(PyObject* array) { return reinterpret_cast<Array*>(array); }

// Returns the bytes of an array whose elements have so many.
inline uint64_t bytes_of(PyObject* array, uint64_t item_bytes) {
  uint64_t size = item_bytes;
  for (int i = 0; i < fields(array)->nd; ++i) size *= static_cast<uint64_t>(fields(array)->dims[i]);
  return size;
}

// Returns true if a view may write to memory that `base` keeps. A page that is only mapped for reading would end the
// process.
inline bool is_writeable(PyObject* base) {
  return !PyObject_TypeCheck(base, array_type) || (fields(base)->flags & kWriteable) != 0;
}

// Returns an array of this type over memory that `base` keeps, C-contiguous; null with an error set, as for a shape
// that no array can have. `descr` is borrowed. `alignment` is that of an element.
inline PyObject* view(PyTypeObject* type, PyObject* descr, int nd, const int64_t* dims, char* data, int64_t alignment,
                      PyObject* base, bool is_writeable) {
  using New = PyObject* (*)(PyTypeObject*, PyObject*, int, const int64_t*, const int64_t*, void*, int, PyObject*);
  using SetBase = int (*)(PyObject*, PyObject*);
  const bool is_aligned = reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(alignment) == 0;
  const int flags = kContiguous | (is_writeable ? kWriteable : 0) | (is_aligned ? kAligned : 0);
  Py_INCREF(descr);  // it is taken
  const auto make = reinterpret_cast<New>(table[kNewFromDescr]);
  PyObject* const array = make(type, descr, nd, dims, nullptr, data, flags, nullptr);
  if (array == nullptr) return nullptr;
  Py_INCREF(base);  // as well
  if (reinterpret_cast<SetBase>(table[kSetBaseObject])(array, base) == 0) return array;
  Py_DECREF(array);
  return nullptr;
}

// Does the same. A view of an array that is only for reading is only for reading, too.
inline PyObject* view(PyTypeObject* type, PyObject* descr, int nd, const int64_t* dims, char* data, int64_t alignment,
                      PyObject* base) {
  return view(type, descr, nd, dims, data, alignment, base, is_writeable(base));
}

// Finds the table. Returns false, with an error set, if numpy is another one than this file knows.
inline bool load(PyObject* example, int64_t address, int64_t rows, int64_t columns) {
  PyObject* module = PyImport_ImportModule("numpy._core._multiarray_umath");
  if (module == nullptr) {
    PyErr_Clear();
    module = PyImport_ImportModule("numpy.core._multiarray_umath");
  }
  PyObject* const capsule = module == nullptr ? nullptr : PyObject_GetAttrString(module, "_ARRAY_API");
  table = capsule == nullptr ? nullptr : static_cast<void**>(PyCapsule_GetPointer(capsule, nullptr));
  Py_XDECREF(capsule);
  Py_XDECREF(module);
  if (table == nullptr) return false;
  array_type = static_cast<PyTypeObject*>(table[kArrayType]);
  const Array* const seen = fields(example);
  const bool is_known = is_array(example) && reinterpret_cast<int64_t>(seen->data) == address && seen->nd == 2 &&
                        seen->dims[0] == rows && seen->dims[1] == columns && seen->base == nullptr &&
                        (seen->flags & kContiguous) != 0;
  if (is_known) return true;
  PyErr_SetString(PyExc_ImportError, "numpy keeps its arrays in another form than this file was compiled for");
  return false;
}

}  // namespace moonpool::numpy
