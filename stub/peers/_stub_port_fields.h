// Python's objects as the compiled part of a stub sees them: owned references, bytes, and attributes read where they
// lie.
//
// Theory of operation. It works on the very objects that Python's code works on. An attribute of a class with
// `__slots__` is one pointer at a fixed place in its instances, which the limited API does not tell. So it is found by
// a try: an object that is nowhere else is set, and the instance is searched for it. Nothing here knows how CPython
// arranges slots. A place is used only in instances of the class that it was found in, and of classes made from that
// one, which keep it. In any other object, the attribute is looked up by its name.
//
// An object of ours may be missing, as a class is not known yet or an attribute is not set. So what takes objects here
// takes a null for "not there", and fails with an error set.
//
// Everything here needs the interpreter's lock.
#pragma once

#include "sources.h"  // first, as Python wants it

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <utility>
#include <vector>

namespace moonpool::python {

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
  char* data() const { return static_cast<char*>(view_.buf); }
  int64_t size() const { return view_.len; }

 private:
  Py_buffer view_{};
  bool is_there_;
};

// Sets an error of ours, if none is set. Returns false.
template <class... Arguments>
bool fail(const char* format, Arguments... arguments) {
  if (PyErr_Occurred() == nullptr) PyErr_Format(PyExc_SystemError, format, arguments...);
  return false;
}

// Keeps the error that is set while other code runs, if one is set, and puts it back. An error of that code is reported
// and dropped.
class KeptError {
 public:
  KeptError() {
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    type_ = Ref(type);
    value_ = Ref(value);
    traceback_ = Ref(traceback);
  }
  KeptError(const KeptError&) = delete;
  KeptError& operator=(const KeptError&) = delete;
  ~KeptError() {
    if (!type_) return;
    if (PyErr_Occurred()) PyErr_WriteUnraisable(nullptr);
    PyErr_Restore(type_.release(), value_.release(), traceback_.release());
  }

 private:
  Ref type_, value_, traceback_;
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
    if (PyObject* const value = peek(object)) return Ref::to(value);
    return is_found_in(object) ? Ref(PyObject_GetAttr(object, name_)) : Ref();
  }
  // Returns the attribute without a reference of its own; null if it is no slot of this object or not set. For objects that stay where
  // they are.
  PyObject* peek(PyObject* object) const { return has_place_in(object) ? *place(object, at_) : nullptr; }
  // Sets the attribute and takes over the reference. Returns false with an error set; also if `value` is null.
  bool set(PyObject* object, PyObject* value) const {
    Ref owned(value);
    if (!owned) return fail("there is nothing that %s could be set to", text_);
    if (!has_place_in(object)) return is_found_in(object) && PyObject_SetAttr(object, name_, owned.get()) == 0;
    Py_XDECREF(std::exchange(*place(object, at_), owned.release()));
    return true;
  }
  bool set_to(PyObject* object, PyObject* borrowed) const { return set(object, Ref::to(borrowed).release()); }

 private:
  friend class Kind;
  bool has_place_in(PyObject* object) const {
    return at_ != 0 && object != nullptr && (Py_TYPE(object) == owner_ || PyType_IsSubtype(Py_TYPE(object), owner_));
  }
  // Returns false with an error set if an object has no attributes, or the name is not known.
  bool is_found_in(PyObject* object) const {
    return (object != nullptr && name_ != nullptr) || fail("there is no object that has %s", text_);
  }
  static PyObject** place(PyObject* object, Py_ssize_t at) {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + at);
  }

  bool know(PyObject* sample, Py_ssize_t size) {
    if (name_ == nullptr) name_ = PyUnicode_InternFromString(text_);
    at_ = 0;
    owner_ = Py_TYPE(sample);
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
  // The class in which the place was found. Its `Kind` keeps it.
  PyTypeObject* owner_ = nullptr;
  Py_ssize_t at_ = 0;
};

// A class whose instances an extension knows. It keeps the class for good.
class Kind {
 public:
  // Takes in the class of `sample`, an instance that nobody uses, and finds the places of its fields, which are not set
  // afterwards. Returns false with an error set.
  bool know(PyObject* sample, std::initializer_list<Field*> fields) {
    const Ref size(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(sample)), "__basicsize__"));
    int64_t size_bytes = 0;
    if (!size || !as_number(size.get(), &size_bytes)) return false;
    size_ = static_cast<Py_ssize_t>(size_bytes);
    for (Field* field : fields) {
      if (!field->know(sample, size_)) return false;
    }
    type_ = Py_TYPE(sample);
    Py_INCREF(type());
    return true;
  }
  // Does the same for a class whose attributes are all slots, so that `peek` finds each and `copy` makes another instance.
  bool know_slots(PyObject* sample, std::initializer_list<Field*> fields) {
    if (!know(sample, fields)) return false;
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
  Ref make() const { return is_known() ? Ref(PyType_GenericAlloc(type_, 0)) : Ref(); }
  // Returns a new instance with the attributes of another one, empty with an error set. Only after `know_slots`.
  Ref copy(PyObject* object) const {
    if (!is(object)) fail("there is no object of the class to copy");
    Ref made = is(object) ? make() : Ref();
    if (!made) return made;
    for (const Py_ssize_t at : slots_) {
      *Field::place(made.get(), at) = Ref::to(*Field::place(object, at)).release();
    }
    return made;
  }
  // Returns false with an error set if no class was taken in yet.
  bool is_known() const { return type_ != nullptr || fail("there is no class yet to make an object of"); }
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

// Calls a function that may throw for want of memory, and returns its result, or null with an exception: Python would meet an exception
// beside a result at some later time, and take it for that of other code.
template <class F>
PyObject* guarded(const F& function) {
  Ref result;
  try {
    result = Ref(function());
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  if (!result) fail("a compiled function failed and set no error");
  if (PyErr_Occurred() == nullptr) return result.release();
  const KeptError kept;
  result = Ref();
  return nullptr;
}

}  // namespace moonpool::python
