// The contents of the requests of a batch, in the form in which a stub gets them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "api.h"
#include "model.h"
#include "open_requests.h"
#include "parameters.h"
#include "place.h"
#include "wire.h"

namespace moonpool {

// Checks that an input, in one buffer after another, holds as many strings as its shape says. Throws Failure with
// Triton's text.
class Strings {
 public:
  Strings(const char* input, uint64_t expected) : input_(input), expected_(expected) {}

  void look(const void* buffer, uint64_t size) {
    for (uint64_t at = 0;;) {
      const uint64_t inside = std::min<uint64_t>(left_, size - at);
      left_ -= inside;
      at += inside;
      if (at == size) return;
      if (count_ == expected_) {
        refuse("unexpected number of string elements " + std::to_string(count_ + 1),
               "expecting " + std::to_string(expected_));
      }
      if (size - at < wire::kLengthBytes) {
        refuse("incomplete string length indicator",
               "expecting 4 bytes but only " + std::to_string(size - at) +
                   " bytes available. Please make sure the string length indicator is in one buffer.");
      }
      std::memcpy(&length_, static_cast<const char*>(buffer) + at, wire::kLengthBytes);
      left_ = length_;
      at += wire::kLengthBytes;
      ++count_;
    }
  }

  void end() const {
    if (left_ > 0) {
      refuse("incomplete string data", "expecting string of length " + std::to_string(length_) + " but only " +
                                           std::to_string(length_ - left_) + " bytes available");
    }
    if (count_ < expected_) {
      refuse("expected " + std::to_string(expected_) + " strings", "got " + std::to_string(count_));
    }
  }

 private:

  [[noreturn]] void refuse(const std::string& what, const std::string& why) const {
    throw Failure(triton::kInvalidArg, what + " for inference input '" + input_ + "', " + why);
  }

  const char* const input_;
  const uint64_t expected_;
  uint64_t count_ = 0;
  uint32_t length_ = 0, left_ = 0;  // of the last string: its bytes, and those still missing
};

// Collects the requests of one batch after another, with the same memory. For one thread at a time.
class Requests {
 public:
  // `is_on_device` is true for models that might leave outputs on a device, where they are not wanted.
  Requests(const Model& model, bool is_on_device) : model_(model), is_on_device_(is_on_device) {}

  // Begin with a batch of this number.
  void begin(uint64_t batch) {
    requests_.clear();
    counts_.clear();
    tensors_.clear();
    sources_.clear();
    details_.clear();
    has_details_ = false;
    rows_ = 0;
    batch_ = batch;
  }

  // Adds a request. Throws Failure and leaves it out if it cannot be executed.
  void add(triton::Request* request) {
    const size_t details = details_.bytes().size();
    try {
      gather(request);
    } catch (const Failure&) {
      details_.cut(details);
      throw;
    }
  }

  const std::vector<triton::Request*>& all() const { return requests_; }
  // Returns the sum of their rows, as the server counts them.
  uint64_t rows() const { return rows_; }

  // Plans a block for all inputs, and returns its size in bytes. Throws Failure if they are too large for any.
  uint64_t lay_out() {
    uint64_t size;
    if (!place(counts_, tensors_, &size)) {
      throw Failure(triton::kUnavailable, "the inputs of the batch have more bytes than memory can have");
    }
    layout_.clear();
    write_layout(layout_, counts_, tensors_);
    return size;
  }

  void copy(char* block) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Source& source = sources_[i];
      char* at = block + tensors_[i].offset;
      uint64_t left = tensors_[i].size;
      const void* bytes = source.bytes;
      uint64_t size = source.size;
      for (uint32_t number = 0; number < source.buffers && left > 0; ++number) {
        int memory_type = triton::kCpu;
        int64_t memory_type_id = 0;
        if (number > 0) {
          check(triton::InputBuffer(source.input, number, &bytes, &size, &memory_type, &memory_type_id));
        }
        size = std::min(size, left);
        std::memcpy(at, bytes, size);
        at += size;
        left -= size;
      }
    }
  }

  // Writes the block's layout, and the details of each request, as in EXECUTE.
  std::string_view layout() const { return layout_.bytes(); }
  void write_details(Writer& writer) const {
    if (!has_details_) return writer.nil();
    writer.array(counts_.size());
    writer.values(details_.bytes());
  }

 private:
  // Values of the details of a request.
  static constexpr size_t kDetails = 10;

  static uint64_t elements_of(const int64_t* shape, uint32_t dims) {
    uint64_t count = 1;
    for (uint32_t i = 0; i < dims; ++i) count *= static_cast<uint64_t>(shape[i]);
    return count;
  }

  static std::string_view text(const char* value) { return value ? value : ""; }

  // Returns the index of a name; the number of names if it is not one of them.
  static size_t number_of(const char* name, const std::vector<std::string>& names) {
    return static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
  }

  // The bytes of an input: those of the first buffer, and of the others, which the server is asked for.
  struct Source {
    triton::Input* input;
    uint32_t buffers;
    const void* bytes;
    uint64_t size;
  };
  void gather(triton::Request* request) {
    uint32_t count;
    check(triton::RequestInputCount(request, &count));
    gathered_.clear();
    for (uint32_t i = 0; i < count; ++i) gather_input(request, i);
    gather_details(request);
    std::sort(gathered_.begin(), gathered_.end(),
              [](const auto& one, const auto& other) { return one.first.index < other.first.index; });
    const bool has_rows = model_.facts().max_batch_size > 0 && count > 0 && gathered_[0].first.dims > 0;
    rows_ += has_rows ? static_cast<uint64_t>(gathered_[0].first.shape[0]) : 1;
    for (const auto& [tensor, source] : gathered_) {
      tensors_.push_back(tensor);
      sources_.push_back(source);
    }
    requests_.push_back(request);
    counts_.push_back(count);
  }

  void gather_input(triton::Request* request, uint32_t number) {
    PlacedTensor tensor{};
    Source source{};
    const char* name;
    int datatype;
    uint32_t dims;
    check(triton::RequestInputByIndex(request, number, &source.input));
    check(triton::InputProperties(source.input, &name, &datatype, &tensor.shape, &dims, &tensor.size,
                                  &source.buffers));
    const auto refuse = [name](int code, const std::string& why) {
      throw Failure(code, std::string("input '") + name + "' " + why);
    };
    tensor.index = number_of(name, model_.inputs());
    tensor.datatype = static_cast<uint64_t>(datatype);
    tensor.dims = dims;
    if (tensor.index == model_.inputs().size()) refuse(triton::kInvalidArg, "is not one of the model's");
    if (dims > wire::kMaxDims) refuse(triton::kInvalidArg, "has more dimensions than a tensor may have");
    const bool has_strings = datatype == triton::kBytes;
    const uint64_t elements = elements_of(tensor.shape, dims);
    if (!has_strings && elements * wire::kItemBytes.at(tensor.datatype) != tensor.size) {
      refuse(triton::kInvalidArg, "has " + std::to_string(tensor.size) + " bytes, which do not fit its shape");
    }
    Strings strings(name, elements);
    for (uint32_t i = 0; i < source.buffers; ++i) {
      const void* bytes;
      uint64_t size;
      int memory_type = triton::kCpu;
      int64_t memory_type_id = 0;
      check(triton::InputBuffer(source.input, i, &bytes, &size, &memory_type, &memory_type_id));
      if (memory_type == triton::kGpu) {
        refuse(triton::kUnsupported, "lies in GPU memory, which moonpool does not read");
      }
      if (has_strings) strings.look(bytes, size);
      if (i == 0) {
        source.bytes = bytes;
        source.size = size;
      }
    }
    if (has_strings) strings.end();
    gathered_.emplace_back(tensor, source);
  }

  void gather_details(triton::Request* request) {
    const char *id = nullptr, *correlation_text = nullptr;
    uint64_t correlation = 0, timeout_us;
    uint32_t flags, parameters, outputs;
    triton::Trace* trace = nullptr;
    check(triton::RequestId(request, &id));
    if (triton::Error* error = triton::RequestCorrelationId(request, &correlation)) {
      triton::ErrorDelete(error);
      check(triton::RequestCorrelationIdString(request, &correlation_text));
    }
    check(triton::RequestFlags(request, &flags));
    check(triton::InferenceRequestTimeoutMicroseconds(request, &timeout_us));
    check(triton::RequestParameterCount(request, &parameters));
    check(triton::RequestOutputCount(request, &outputs));
    if (triton::RequestTrace) check(triton::RequestTrace(request, &trace));
    const bool is_named = !text(correlation_text).empty();
    if (text(id).empty() && correlation == 0 && !is_named && flags == 0 && timeout_us == 0 && parameters == 0 &&
        outputs == model_.outputs().size() && !trace && !is_on_device_) {
      return details_.nil();
    }
    // A text that is no UTF-8 grows to three times its size when it is sent.
    const size_t longest_id = is_utf8(text(id)) ? wire::kLong : wire::kLong / 3;
    if (text(id).size() > longest_id || parameters > wire::kMaxParameters) {
      throw Failure(triton::kInvalidArg, "the request's id is too long, or it has too many parameters");
    }
    has_details_ = true;
    details_.array(kDetails);
    details_.text(text(id));
    if (is_named) {
      details_.text(correlation_text);
    } else {
      details_.uint(correlation);
    }
    // The server has applied the priority already, and does not give it to backends.
    write_all(details_, flags, timeout_us, 0u);
    write_parameters(details_, parameters,
                     [request](uint32_t i, auto... found) { return triton::RequestParameter(request, i, found...); });
    gather_outputs(request, outputs);
    if (trace) {
      details_.text(name_of(trace, batch_, requests_.size()));
    } else {
      details_.nil();
    }
    write_all(details_, is_on_device_ ? wire::kOrdinaryMemory : wire::kAnyMemory, 0u);
  }

  // Writes the requested outputs; nil if all are.
  void gather_outputs(triton::Request* request, uint32_t count) {
    const auto& names = model_.outputs();
    if (count == names.size()) return details_.nil();
    details_.array(count);
    for (uint32_t i = 0; i < count; ++i) {
      const char* name;
      check(triton::RequestOutputName(request, i, &name));
      const size_t number = number_of(name, names);
      if (number == names.size()) {
        throw Failure(triton::kInvalidArg, std::string("output '") + name + "' is not one of the model's");
      }
      details_.uint(number);
    }
  }

  const Model& model_;
  const bool is_on_device_;
  std::vector<triton::Request*> requests_;
  // How many of the tensors each request has. A tensor has its source at the same index.
  std::vector<uint32_t> counts_;
  std::vector<PlacedTensor> tensors_;
  std::vector<Source> sources_;
  // The inputs of the last request, to sort them.
  std::vector<std::pair<PlacedTensor, Source>> gathered_;
  uint64_t batch_ = 0, rows_ = 0;
  // One value for each request, nil for a request without details.
  Writer details_;
  bool has_details_ = false;
  Writer layout_;
};

}  // namespace moonpool
