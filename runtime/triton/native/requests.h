// The contents of the requests of a batch, in the form in which a stub gets them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "api.h"
#include "model.h"
#include "open_requests.h"
#include "parameters.h"
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
    items_.clear();
    tensors_.clear();
    details_.clear();
    has_details_ = false;
    most_tensors_ = 0;
    rows_ = 0;
    batch_ = batch;
  }

  // Adds a request. Throws Failure and leaves it out if it cannot be executed.
  void add(triton::Request* request) {
    const size_t first = tensors_.size(), details = details_.bytes().size();
    try {
      gather(request);
    } catch (const Failure&) {
      tensors_.resize(first);
      details_.cut(details);
      throw;
    }
  }

  const std::vector<triton::Request*>& all() const { return requests_; }
  // Returns the sum of their rows, as the server counts them.
  uint64_t rows() const { return rows_; }

  // Plans a block for all inputs, and returns its size in bytes.
  // The rows of one input lie back to back across the requests, so a model that wants them stacked need not copy
  // them.
  uint64_t lay_out() {
    uint64_t end = 0;
    for (size_t number = 0; number < most_tensors_; ++number) {
      end = (end + wire::kAlignment - 1) & -wire::kAlignment;
      for (const Item& item : items_) {
        if (number >= item.count) continue;
        Tensor& tensor = tensors_[item.first + number];
        // Another request may have another input at this number.
        const uint64_t width = std::max<uint64_t>(1, wire::kItemBytes[static_cast<size_t>(tensor.datatype)]);
        end = (end + width - 1) / width * width;
        tensor.offset = end;
        // An empty tensor takes a byte, so that its block is a borrowed one.
        end += std::max<uint64_t>(1, tensor.size);
      }
    }
    layout_.clear();
    layout_.array(items_.size());
    for (const Item& item : items_) {
      layout_.array(item.count);
      for (size_t i = item.first; i < item.first + item.count; ++i) {
        const Tensor& tensor = tensors_[i];
        write_tensor(layout_, tensor.index, tensor.datatype, tensor.shape, tensor.dims, 0, tensor.offset, tensor.size);
      }
    }
    return end;
  }

  void copy(char* block) const {
    for (const Tensor& tensor : tensors_) {
      char* at = block + tensor.offset;
      uint64_t left = tensor.size;
      const void* bytes = tensor.bytes;
      uint64_t size = tensor.first_size;
      for (uint32_t i = 0; i < tensor.buffers && left > 0; ++i) {
        int memory_type = triton::kCpu;
        int64_t memory_type_id = 0;
        if (i > 0) {
          check(triton::InputBuffer(tensor.input, i, &bytes, &size, &memory_type, &memory_type_id));
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
    writer.array(items_.size());
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

  struct Tensor {
    uint64_t index;
    int datatype;
    const int64_t* shape;
    uint32_t dims, buffers;
    uint64_t size, offset;
    triton::Input* input;
    const void* bytes;  // of the first buffer
    uint64_t first_size;
  };
  struct Item {
    size_t first, count;  // of its tensors
  };
  void gather(triton::Request* request) {
    uint32_t count;
    check(triton::RequestInputCount(request, &count));
    const Item item{tensors_.size(), count};
    for (uint32_t i = 0; i < count; ++i) gather_input(request, i);
    gather_details(request);
    const auto first = tensors_.begin() + static_cast<std::ptrdiff_t>(item.first);
    std::sort(first, tensors_.end(), [](const Tensor& one, const Tensor& other) { return one.index < other.index; });
    const bool has_rows = model_.facts().max_batch_size > 0 && count > 0 && first->dims > 0;
    rows_ += has_rows ? static_cast<uint64_t>(first->shape[0]) : 1;
    most_tensors_ = std::max<size_t>(most_tensors_, count);
    requests_.push_back(request);
    items_.push_back(item);
  }

  void gather_input(triton::Request* request, uint32_t number) {
    Tensor tensor{};
    const char* name;
    check(triton::RequestInputByIndex(request, number, &tensor.input));
    check(triton::InputProperties(tensor.input, &name, &tensor.datatype, &tensor.shape, &tensor.dims, &tensor.size,
                                  &tensor.buffers));
    const auto refuse = [name](int code, const std::string& why) {
      throw Failure(code, std::string("input '") + name + "' " + why);
    };
    tensor.index = number_of(name, model_.inputs());
    if (tensor.index == model_.inputs().size()) refuse(triton::kInvalidArg, "is not one of the model's");
    if (tensor.dims > wire::kMaxDims) refuse(triton::kInvalidArg, "has more dimensions than a tensor may have");
    const bool has_strings = tensor.datatype == triton::kBytes;
    const uint64_t elements = elements_of(tensor.shape, tensor.dims);
    if (!has_strings && elements * wire::kItemBytes.at(static_cast<size_t>(tensor.datatype)) != tensor.size) {
      refuse(triton::kInvalidArg, "has " + std::to_string(tensor.size) + " bytes, which do not fit its shape");
    }
    Strings strings(name, elements);
    for (uint32_t i = 0; i < tensor.buffers; ++i) {
      const void* bytes;
      uint64_t size;
      int memory_type = triton::kCpu;
      int64_t memory_type_id = 0;
      check(triton::InputBuffer(tensor.input, i, &bytes, &size, &memory_type, &memory_type_id));
      if (memory_type == triton::kGpu) {
        refuse(triton::kUnsupported, "lies in GPU memory, which moonpool does not read");
      }
      if (has_strings) strings.look(bytes, size);
      if (i == 0) {
        tensor.bytes = bytes;
        tensor.first_size = size;
      }
    }
    if (has_strings) strings.end();
    tensors_.push_back(tensor);
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
  std::vector<Item> items_;
  std::vector<Tensor> tensors_;
  size_t most_tensors_ = 0;
  uint64_t batch_ = 0, rows_ = 0;
  // One value for each request, nil for a request without details.
  Writer details_;
  bool has_details_ = false;
  Writer layout_;
};

}  // namespace moonpool
