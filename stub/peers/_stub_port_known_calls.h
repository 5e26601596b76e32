// INFER or REPLY that differs from one that came before in nothing but numbers: what `KnownCalls.find` of codec.py finds.
//
// Theory of operation. Python keeps the head, the tail and the value of each message that its codec has read and checked. Here nothing
// of a packet is read but the number of the call and two lists of numbers, between bytes that equal those of such a message.
#pragma once

#include "_stub_port_fields.h"  // first, as Python wants it

#include <string_view>
#include <vector>

#include "msgpack.h"
#include "wire.h"

namespace moonpool::python {

// Returns the bytes of an object, empty if it is none of bytes.
inline std::string_view bytes_of(PyObject* object) {
  char* bytes = nullptr;
  Py_ssize_t size = 0;
  if (object == nullptr || !PyBytes_CheckExact(object) || PyBytes_AsStringAndSize(object, &bytes, &size) != 0) {
    PyErr_Clear();
    return {};
  }
  return {bytes, static_cast<size_t>(size)};
}

// A message that is known.
struct KnownCall {
  uint64_t number = 0;
  std::vector<wire::Place> released;
  std::vector<wire::Block> blocks;
  // What Python made of such a message.
  Ref value;

  // Reads a packet. `begin` are the bytes before the number, and `calls` is the list of (head, tail, value), in which the one that is
  // found goes to the front. Returns false without an error for a packet that Python has to look at.
  bool find(PyObject* begin, PyObject* calls, std::string_view packet) {
    const std::string_view beginning = bytes_of(begin);
    if (beginning.empty() || !PyList_CheckExact(calls) || !begins(packet, beginning)) return false;
    const std::string_view rest = packet.substr(beginning.size());
    const size_t number_bytes = rest.empty() ? 0 : number_size(rest[0]);
    if (number_bytes == 0 || rest.size() < number_bytes) return false;
    const std::string_view behind = rest.substr(number_bytes);
    const Py_ssize_t count = PyList_Size(calls);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const each = PyList_GetItem(calls, i);
      if (PyTuple_Size(each) != 3) break;
      const std::string_view head = bytes_of(PyTuple_GetItem(each, 0)), tail = bytes_of(PyTuple_GetItem(each, 1));
      if (behind.size() < head.size() + tail.size() || !begins(behind, head)) continue;
      if (behind.substr(behind.size() - tail.size()) != tail) continue;
      value = Ref::to(PyTuple_GetItem(each, 2));
      return read(rest.substr(0, number_bytes), behind.substr(head.size(), behind.size() - head.size() - tail.size())) &&
             (i == 0 || to_front(calls, i));
    }
    PyErr_Clear();
    return false;
  }

 private:
  // More places or blocks than a usual call has.
  static constexpr size_t kMostRows = 64;
  static constexpr uint64_t kMostNumber = INT64_MAX;

  static bool begins(std::string_view bytes, std::string_view with) { return bytes.substr(0, with.size()) == with; }

  // Returns the size of an integer of msgpack with this first byte, 0 for anything else.
  static size_t number_size(char first) {
    const auto byte = static_cast<unsigned char>(first);
    if (byte < 0x80) return 1;
    if (byte < 0xCC || byte > 0xCF) return 0;
    return 1 + (size_t{1} << (byte - 0xCC));
  }

  bool read(std::string_view packed_number, std::string_view middle) {
    Reader first(packed_number), lists(middle);
    number = first.uint();
    if (first.failed() || !first.at_end() || number > kMostNumber) return false;
    return rows(lists, 2, [&](const uint64_t* row) { released.push_back({row[0], row[1]}); }) &&
           rows(lists, 3, [&](const uint64_t* row) { blocks.push_back({row[0], row[1], row[2]}); }) && lists.at_end();
  }

  // Reads a list of rows of `width` numbers each.
  template <class Keep>
  static bool rows(Reader& reader, uint32_t width, const Keep& keep) {
    const uint32_t count = reader.array();
    if (reader.failed() || count > kMostRows) return false;
    for (uint32_t i = 0; i < count; ++i) {
      uint64_t row[3] = {};
      if (reader.array() != width) return false;
      for (uint32_t j = 0; j < width; ++j) {
        row[j] = reader.uint();
        if (reader.failed() || row[j] > kMostNumber) return false;
      }
      keep(row);
    }
    return true;
  }

  // The call that came last is mostly the one that comes next.
  static bool to_front(PyObject* calls, Py_ssize_t place) {
    const Ref found = Ref::to(PyList_GetItem(calls, place));
    if (PyList_SetSlice(calls, place, place + 1, nullptr) == 0 && PyList_Insert(calls, 0, found.get()) == 0) return true;
    PyErr_Clear();
    return false;
  }
};

}  // namespace moonpool::python
