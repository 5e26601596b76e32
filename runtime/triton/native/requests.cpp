#include "requests.h"

#include <algorithm>
#include <cstring>

#include "open_requests.h"

namespace moonpool {
namespace {

constexpr uint64_t kAlignment = 64;
// Values of the details of a request, in their order; where its outputs are wanted.
constexpr size_t kDetails = 10;
constexpr uint64_t kAnyMemory = 0, kOrdinaryMemory = 1;

uint64_t elements_of(const int64_t* shape, uint32_t dims) {
  uint64_t count = 1;
  for (uint32_t i = 0; i < dims; ++i) count *= static_cast<uint64_t>(shape[i]);
  return count;
}

std::string_view text(const char* value) { return value ? value : ""; }

void write_parameters(Writer& writer, triton::Request* request, uint32_t count) {
  if (count == 0) return writer.nil();
  writer.map(count);
  for (uint32_t i = 0; i < count; ++i) {
    const char* key;
    int type;
    const void* value;
    check(triton::RequestParameter(request, i, &key, &type, &value));
    writer.text(key);
    switch (type) {
      case triton::kString:
        writer.text(static_cast<const char*>(value));
        break;
      case triton::kInt:
        writer.integer(*static_cast<const int64_t*>(value));
        break;
      case triton::kBool:
        writer.flag(*static_cast<const bool*>(value));
        break;
      case triton::kDouble:
        writer.real(*static_cast<const double*>(value));
        break;
      default:
        throw Failure(triton::kUnsupported, std::string("parameter '") + key + "' is of a type that models cannot get");
    }
  }
}

}  // namespace

void Requests::clear() {
  requests_.clear();
  items_.clear();
  tensors_.clear();
  most_tensors_ = 0;
  rows_ = 0;
}

void Requests::add(triton::Request* request) {
  const size_t first = tensors_.size();
  try {
    gather(request);
  } catch (const Failure&) {
    tensors_.resize(first);
    throw;
  }
}

void Requests::gather(triton::Request* request) {
  uint32_t count;
  check(triton::RequestInputCount(request, &count));
  Item item{tensors_.size(), count, details_of(request), false};
  item.has_details = !are_usual(item.details);
  for (uint32_t i = 0; i < count; ++i) gather_input(request, i);
  const auto first = tensors_.begin() + static_cast<std::ptrdiff_t>(item.first);
  std::sort(first, tensors_.end(),
            [](const Tensor& one, const Tensor& other) { return one.index < other.index; });
  const bool has_rows = model_.has_batches() && count > 0 && first->dims > 0;
  rows_ += has_rows ? static_cast<uint64_t>(first->shape[0]) : 1;
  most_tensors_ = std::max<size_t>(most_tensors_, count);
  requests_.push_back(request);
  items_.push_back(item);
}

void Requests::gather_input(triton::Request* request, uint32_t number) {
  Tensor tensor{};
  const char* name;
  check(triton::RequestInputByIndex(request, number, &tensor.input));
  check(triton::InputProperties(tensor.input, &name, &tensor.datatype, &tensor.shape, &tensor.dims,
                                &tensor.size, &tensor.buffers));
  const auto& names = model_.inputs();
  const auto known = std::find(names.begin(), names.end(), name);
  const std::string where = std::string("input '") + name + "' ";
  if (known == names.end()) throw Failure(triton::kInvalidArg, where + "is not one of the model's");
  tensor.index = static_cast<uint64_t>(known - names.begin());
  if (tensor.dims > wire::kMaxDims) {
    throw Failure(triton::kInvalidArg, where + "has more dimensions than a tensor may have");
  }
  if (tensor.datatype != triton::kBytes &&
      elements_of(tensor.shape, tensor.dims) * wire::kItemBytes.at(static_cast<size_t>(tensor.datatype)) !=
          tensor.size) {
    throw Failure(triton::kInvalidArg, where + "has " + std::to_string(tensor.size) +
                                           " bytes, which its shape has not");
  }
  for (uint32_t i = 0; i < tensor.buffers; ++i) {
    const void* bytes;
    uint64_t size;
    int memory_type = triton::kCpu;
    int64_t memory_type_id = 0;
    check(triton::InputBuffer(tensor.input, i, &bytes, &size, &memory_type, &memory_type_id));
    if (memory_type == triton::kGpu) {
      throw Failure(triton::kUnsupported, where + "lies in GPU memory, which moonpool does not read");
    }
    if (i == 0) {
      tensor.bytes = bytes;
      tensor.first_size = size;
    }
  }
  tensors_.push_back(tensor);
}

Requests::Details Requests::details_of(triton::Request* request) const {
  Details details{};
  const char* id = nullptr;
  check(triton::RequestId(request, &id));
  details.id = text(id);
  if (details.id.size() > wire::kLong) {
    throw Failure(triton::kInvalidArg, "the request's id is longer than any may be");
  }
  if (triton::Error* error = triton::RequestCorrelationId(request, &details.correlation)) {
    triton::ErrorDelete(error);
    const char* correlation;
    check(triton::RequestCorrelationIdString(request, &correlation));
    details.correlation_text = text(correlation);
  }
  check(triton::RequestFlags(request, &details.flags));
  check(triton::InferenceRequestTimeoutMicroseconds(request, &details.timeout_us));
  check(triton::RequestParameterCount(request, &details.parameters));
  if (details.parameters > wire::kMaxParameters) {
    throw Failure(triton::kInvalidArg, "the request has more parameters than any may have");
  }
  check(triton::RequestOutputCount(request, &details.outputs));
  if (triton::RequestTrace) check(triton::RequestTrace(request, &details.trace));
  return details;
}

bool Requests::are_usual(const Details& details) const {
  return details.id.empty() && details.correlation == 0 && details.correlation_text.empty() &&
         details.flags == 0 && details.timeout_us == 0 && details.parameters == 0 &&
         details.outputs == model_.outputs().size() && !details.trace && !is_on_device_;
}

// The rows of one input lie back to back across the requests, so that a model which wants them stacked has them
// stacked.
uint64_t Requests::lay_out() {
  uint64_t end = 0;
  for (size_t number = 0; number < most_tensors_; ++number) {
    end = (end + kAlignment - 1) & -kAlignment;
    for (const Item& item : items_) {
      if (number >= item.count) continue;
      Tensor& tensor = tensors_[item.first + number];
      // Another request may have another input at this number.
      const uint64_t width = std::max<uint64_t>(1, wire::kItemBytes[static_cast<size_t>(tensor.datatype)]);
      end = (end + width - 1) / width * width;
      tensor.offset = end;
      // A tensor of nothing takes a byte, so that its block is one that was lent.
      end += std::max<uint64_t>(1, tensor.size);
    }
  }
  layout_.clear();
  layout_.array(items_.size());
  for (const Item& item : items_) {
    layout_.array(item.count);
    for (size_t i = item.first; i < item.first + item.count; ++i) {
      const Tensor& tensor = tensors_[i];
      layout_.array(6);
      layout_.uint(tensor.index);
      layout_.uint(static_cast<uint64_t>(tensor.datatype));
      layout_.array(tensor.dims);
      for (uint32_t dim = 0; dim < tensor.dims; ++dim) layout_.integer(tensor.shape[dim]);
      layout_.uint(0);
      layout_.uint(tensor.offset);
      layout_.uint(tensor.size);
    }
  }
  return end;
}

void Requests::copy(char* block) const {
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

void Requests::write_details_of(Writer& writer, uint64_t batch, size_t i) const {
  const Details& details = items_[i].details;
  if (!items_[i].has_details) return writer.nil();
  writer.array(kDetails);
  writer.text(details.id);
  if (details.correlation_text.empty()) {
    writer.uint(details.correlation);
  } else {
    writer.text(details.correlation_text);
  }
  writer.uint(details.flags);
  writer.uint(details.timeout_us);
  writer.uint(0);  // the server has applied the priority already, and tells nobody of it
  write_parameters(writer, requests_[i], details.parameters);
  const auto& names = model_.outputs();
  if (details.outputs == names.size()) {
    writer.nil();
  } else {
    writer.array(details.outputs);
    for (uint32_t output = 0; output < details.outputs; ++output) {
      const char* name;
      check(triton::RequestOutputName(requests_[i], output, &name));
      const auto known = std::find(names.begin(), names.end(), name);
      if (known == names.end()) {
        throw Failure(triton::kInvalidArg, std::string("output '") + name + "' is not one of the model's");
      }
      writer.integer(known - names.begin());
    }
  }
  if (details.trace) {
    writer.text(name_of(details.trace, batch, i));
  } else {
    writer.nil();
  }
  writer.uint(is_on_device_ ? kOrdinaryMemory : kAnyMemory);
  writer.uint(0);
}

void Requests::write_details(Writer& writer, uint64_t batch) const {
  const auto has_details = [](const Item& item) { return item.has_details; };
  if (std::none_of(items_.begin(), items_.end(), has_details)) return writer.nil();
  writer.array(items_.size());
  for (size_t i = 0; i < items_.size(); ++i) write_details_of(writer, batch, i);
}

}  // namespace moonpool
