// Parameters of requests and responses, as Triton has them and as they travel.
#pragma once

#include <limits>
#include <string>

#include "api.h"
#include "msgpack.h"

namespace moonpool {

// Triton's functions for what has parameters; `real` is null in servers that are too old.
template <class T>
struct Setters {
  triton::Error* (*text)(T*, const char* name, const char* value);
  triton::Error* (*integer)(T*, const char* name, int64_t);
  triton::Error* (*flag)(T*, const char* name, bool);
  triton::Error* (*real)(T*, const char* name, double);
};

// Throws Failure.
template <class T>
void set_parameter(T* owner, const Setters<T>& set, const Entry& entry) {
  const std::string name(entry.name);
  const Value& value = entry.value;
  const bool is_small = value.number <= uint64_t{std::numeric_limits<int64_t>::max()};
  if (value.form == Form::kText) {
    check(set.text(owner, name.c_str(), std::string(value.bytes).c_str()));
  } else if (value.form == Form::kNegative || (value.form == Form::kUint && is_small)) {
    const bool is_negative = value.form == Form::kNegative;
    check(set.integer(owner, name.c_str(), is_negative ? value.negative : static_cast<int64_t>(value.number)));
  } else if (value.form == Form::kFlag) {
    check(set.flag(owner, name.c_str(), value.number != 0));
  } else if (value.form == Form::kReal && set.real) {
    check(set.real(owner, name.c_str(), value.real));
  } else {
    throw Failure(triton::kInvalidArg, "Unsupported parameter type for parameter '" + name + "'.");
  }
}

// Writes name and value. Throws Failure for a type that models cannot get.
inline void write_parameter(Writer& writer, const char* name, int type, const void* value) {
  writer.text(name);
  switch (type) {
    case triton::kString:
      return writer.text(static_cast<const char*>(value));
    case triton::kInt:
      return writer.integer(*static_cast<const int64_t*>(value));
    case triton::kBool:
      return writer.flag(*static_cast<const bool*>(value));
    case triton::kDouble:
      return writer.real(*static_cast<const double*>(value));
    default:
      throw Failure(triton::kUnsupported,
                    std::string("Unsupported parameter type for parameter '") + name + "'.");
  }
}

}  // namespace moonpool
