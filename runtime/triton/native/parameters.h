// Parameters of requests and responses, in Triton's form and in messages.
#pragma once

#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "api.h"
#include "msgpack.h"

namespace moonpool {

// Owns parameters while a call uses them.
class Parameters {
 public:
  Parameters() = default;
  ~Parameters() {
    for (const triton::Parameter* each : all_) triton::ParameterDelete(const_cast<triton::Parameter*>(each));
  }
  Parameters(const Parameters&) = delete;
  void add(std::string_view name, std::string_view text) {
    all_.push_back(triton::ParameterNew(std::string(name).c_str(), triton::kString, std::string(text).c_str()));
  }
  void add(std::string_view name, Raw value) {
    all_.push_back(triton::ParameterBytesNew(std::string(name).c_str(), value.bytes.data(), value.bytes.size()));
  }
  const triton::Parameter** data() { return all_.data(); }
  size_t size() const { return all_.size(); }

 private:
  std::vector<const triton::Parameter*> all_;
};

// Triton's setters of parameters, for requests or responses; `real` is null in servers that are too old.
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
  const auto number = static_cast<int64_t>(value.number);
  if (value.form == Form::kText) {
    check(set.text(owner, name.c_str(), std::string(value.bytes).c_str()));
  } else if (value.form == Form::kNegative || (value.form == Form::kUint && number >= 0)) {
    check(set.integer(owner, name.c_str(), number));
  } else if (value.form == Form::kFlag) {
    check(set.flag(owner, name.c_str(), value.number != 0));
  } else if (value.form == Form::kReal && !std::isfinite(value.real)) {
    // The server writes parameters into JSON, which has no such number.
    throw Failure(triton::kInvalidArg, "parameter '" + name + "' must be a finite number");
  } else if (value.form == Form::kReal && set.real) {
    check(set.real(owner, name.c_str(), value.real));
  } else {
    throw Failure(triton::kInvalidArg, "Unsupported parameter type for parameter '" + name + "'.");
  }
}

// Writes the name and the value. Throws Failure for a type that models cannot get.
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
      throw Failure(triton::kUnsupported, std::string("Unsupported parameter type for parameter '") + name + "'.");
  }
}

// Writes so many parameters, or nil for none. `get` asks the server for one by its index, as RequestParameter does.
template <class Get>
void write_parameters(Writer& writer, uint32_t count, const Get& get) {
  if (count == 0) return writer.nil();
  writer.map(count);
  for (uint32_t i = 0; i < count; ++i) {
    const char* name;
    int type;
    const void* value;
    check(get(i, &name, &type, &value));
    write_parameter(writer, name, type, value);
  }
}

}  // namespace moonpool
