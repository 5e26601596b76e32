// Python's objects as the extensions see them: owned references, bytes, and attributes that are read where they lie.
//
// Theory of operation. The extensions work on the very objects that Python's code works on. An attribute of a class with `__slots__` is
// one pointer at a fixed place in its instances, which the limited API does not tell. So it is found by a try: an object that is
// nowhere else is set, and the instance is searched for it. Nothing here knows how CPython arranges slots.
//
// Everything here needs the interpreter's lock.
#pragma once

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <time.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <utility>
#include <vector>

namespace moonpool::python {

// Adds the checksum of the sources, by which `moonpool.ipc.extension` knows an extension that is older than they are. Whoever compiles an
// extension passes it. Returns -1 with an error set, else 0.
inline int add_sources(PyObject* module) { return PyModule_AddStringConstant(module, "SOURCES", MOONPOOL_SOURCES); }

// Owns a reference, or none.
class Ref {
 public:
  Ref() = default;
  // Takes over a reference that a function returned.
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    // The old object's destructor may run any code, and must find this reference changed.
    PyObject* old = std::exchange(object_, other.release());
    Py_XDECREF(old);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  // Makes a reference of its own to an object that somebody else keeps.
  static Ref to(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Ref(borrowed);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }
  bool is(PyObject* other) const { return object_ == other; }
  bool is_none() const { return object_ == Py_None; }
  bool is_true() const { return object_ == Py_True; }

 private:
  PyObject* object_ = nullptr;
};

// The bytes of an object with the buffer protocol, for as long as this lives.
class Bytes {
 public:
  // If the object does not give them in C order, an exception is set and the result is false.
  Bytes(PyObject* object, int flags) : is_there_(PyObject_GetBuffer(object, &view_, flags) == 0) {}
  Bytes(Bytes&& other) noexcept : view_(other.view_), is_there_(std::exchange(other.is_there_, false)) {}
  Bytes(const Bytes&) = delete;
  ~Bytes() {
    if (is_there_) PyBuffer_Release(&view_);
  }
  explicit operator bool() const { return is_there_; }
  // The object that they are of, borrowed.
  PyObject* object() const { return view_.obj; }
  char* data() const { return static_cast<char*>(view_.buf); }
  int64_t size() const { return view_.len; }

 private:
  Py_buffer view_{};
  bool is_there_;
};

// Reads an int that fits into 64 bits. Returns false, without an error, for anything else.
inline bool as_number(PyObject* object, int64_t* number) {
  if (object == nullptr || !PyLong_CheckExact(object)) return false;
  int overflow = 0;
  *number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

// One attribute of the instances of a class. It keeps its name for good: extensions are never unloaded.
class Field {
 public:
  explicit constexpr Field(const char* name) : text_(name) {}

  // Returns the attribute, empty with an error set if there is none.
  Ref get(PyObject* object) const {
    if (at_ != 0) {
      PyObject* value = *place(object, at_);
      if (value != nullptr) return Ref::to(value);
    }
    return Ref(PyObject_GetAttr(object, name_));
  }
  // Returns the attribute without a reference of its own; null if it is no slot or not set. For objects that stay where they are.
  PyObject* peek(PyObject* object) const { return at_ == 0 ? nullptr : *place(object, at_); }
  // Sets the attribute and takes over the reference. Returns false with an error set; also if `value` is null.
  bool set(PyObject* object, PyObject* value) const {
    if (value == nullptr) return false;
    if (at_ == 0) return PyObject_SetAttr(object, name_, Ref(value).get()) == 0;
    Py_XDECREF(std::exchange(*place(object, at_), value));
    return true;
  }
  bool set_to(PyObject* object, PyObject* borrowed) const { return set(object, Ref::to(borrowed).release()); }
  bool is_true(PyObject* object) const { return get(object).is_true(); }
  bool is_none(PyObject* object) const { return get(object).is_none(); }

 private:
  friend class Kind;
  static PyObject** place(PyObject* object, Py_ssize_t at) {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + at);
  }

  bool learn(PyObject* sample, Py_ssize_t size) {
    if (name_ == nullptr) name_ = PyUnicode_InternFromString(text_);
    return name_ != nullptr && find(sample, name_, size, &at_);
  }

  // Finds the place of a slot, 0 if the attribute is no slot or may be at several places. Returns false with an error set.
  static bool find(PyObject* sample, PyObject* name, Py_ssize_t size, Py_ssize_t* at) {
    const Ref mark(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type)));
    if (!mark || PyObject_SetAttr(sample, name, mark.get()) != 0) return false;
    Py_ssize_t found = 0, count = 0;
    const Py_ssize_t pointer = sizeof(PyObject*);
    for (Py_ssize_t each = sizeof(PyObject); each + pointer <= size; each += pointer) {
      if (*place(sample, each) != mark.get()) continue;
      found = each;
      ++count;
    }
    if (PyObject_DelAttr(sample, name) != 0) return false;
    *at = count == 1 ? found : 0;
    return true;
  }

  const char* text_;
  PyObject* name_ = nullptr;
  Py_ssize_t at_ = 0;
};

// A class whose instances an extension knows. It keeps the class for good.
class Kind {
 public:
  // Takes in the class of `sample`, an instance that nobody uses, and finds the places of its fields, which are not set
  // afterwards. Returns false with an error set.
  bool learn(PyObject* sample, std::initializer_list<Field*> fields) {
    const Ref size(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(sample)), "__basicsize__"));
    int64_t size_bytes = 0;
    if (!size || !as_number(size.get(), &size_bytes)) return false;
    size_ = static_cast<Py_ssize_t>(size_bytes);
    for (Field* field : fields) {
      if (!field->learn(sample, size_)) return false;
    }
    type_ = Py_TYPE(sample);
    Py_INCREF(type());
    return true;
  }
  // Does the same for a class whose attributes are all slots, so that `peek` finds each and `copy` makes another instance.
  bool learn_slots(PyObject* sample, std::initializer_list<Field*> fields) {
    if (!learn(sample, fields)) return false;
    for (const Field* field : fields) {
      if (field->at_ == 0) return has_no_slot(field->name_);
    }
    const Ref slots(PyObject_GetAttrString(type(), "__slots__"));
    const Ref names(slots ? PySequence_Tuple(slots.get()) : nullptr);
    if (!names) return false;
    for (Py_ssize_t i = 0; i < PyTuple_Size(names.get()); ++i) {
      PyObject* const name = PyTuple_GetItem(names.get(), i);
      if (PyUnicode_CompareWithASCIIString(name, "__weakref__") == 0) continue;
      Py_ssize_t at = 0;
      if (!Field::find(sample, name, size_, &at)) return false;
      if (at == 0) return has_no_slot(name);
      slots_.push_back(at);
    }
    return true;
  }

  // True for an instance of that very class: one of a subclass may mean something else by the same attributes.
  bool is(PyObject* object) const { return object != nullptr && Py_TYPE(object) == type_; }
  // Returns a new instance with no attribute set, empty with an error set. Only for classes all of whose fields are slots.
  Ref make() const { return Ref(PyType_GenericAlloc(type_, 0)); }
  // Returns a new instance with the attributes of another one, empty with an error set. Only after `learn_slots`.
  Ref copy(PyObject* object) const {
    Ref made = make();
    if (!made) return made;
    for (const Py_ssize_t at : slots_) {
      *Field::place(made.get(), at) = Ref::to(*Field::place(object, at)).release();
    }
    return made;
  }
  PyObject* type() const { return reinterpret_cast<PyObject*>(type_); }

 private:
  bool has_no_slot(PyObject* name) const {
    PyErr_Format(PyExc_TypeError, "%R has no slot of its own for %R", type(), name);
    return false;
  }

  PyTypeObject* type_ = nullptr;
  Py_ssize_t size_ = 0;
  // The places of all attributes.
  std::vector<Py_ssize_t> slots_;
};

// Calls a function that may throw for want of memory, and returns its result, or null with an exception.
template <class F>
PyObject* guarded(const F& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// Python's own clock for times in a request.
inline int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

}  // namespace moonpool::python
