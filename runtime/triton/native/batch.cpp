#include "batch.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace moonpool {
namespace {

using wire::Kind;

constexpr uint64_t kAlignment = 64;
// Values of the details of a request, in their order; where its outputs are wanted.
constexpr size_t kDetails = 10;
constexpr uint64_t kAnyMemory = 0, kOrdinaryMemory = 1;

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   Clock::now().time_since_epoch())
                                   .count());
}

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

void Batch::gather(triton::Request** requests, uint32_t count) {
  start_ns_ = sent_ns_ = answered_ns_ = now_ns();
  requests_.clear();
  items_.clear();
  tensors_.clear();
  most_tensors_ = 0;
  rows_ = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const size_t first = tensors_.size();
    try {
      gather_one(requests[i]);
    } catch (const Failure& failure) {
      tensors_.resize(first);
      fail_alone(requests[i], failure);
    }
  }
}

void Batch::gather_one(triton::Request* request) {
  uint32_t count;
  check(triton::RequestInputCount(request, &count));
  Item item{tensors_.size(), count, details_of(request), false, false, true, {}};
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

void Batch::gather_input(triton::Request* request, uint32_t number) {
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

Batch::Details Batch::details_of(triton::Request* request) const {
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
  triton::Trace* trace = nullptr;
  if (triton::RequestTrace && triton::InferenceTraceContext) {
    check(triton::RequestTrace(request, &trace));
    const char* context = nullptr;
    if (trace) check(triton::InferenceTraceContext(trace, &context));
    details.trace = text(context).substr(0, wire::kShort);
  }
  return details;
}

bool Batch::are_usual(const Details& details) const {
  return details.id.empty() && details.correlation == 0 && details.correlation_text.empty() &&
         details.flags == 0 && details.timeout_us == 0 && details.parameters == 0 &&
         details.outputs == model_.outputs().size() && details.trace.empty() && !is_on_device_;
}

// The rows of one input lie back to back across the requests, so that a model which wants them stacked has them
// stacked.
void Batch::lay_out() {
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
  size_ = end;
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
}

void Batch::copy(char* block) const {
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

void Batch::write_details_of(Writer& writer, size_t i) const {
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
  if (details.trace.empty()) {
    writer.nil();
  } else {
    writer.text(details.trace);
  }
  writer.uint(is_on_device_ ? kOrdinaryMemory : kAnyMemory);
  writer.uint(0);
}

void Batch::write_details(Writer& writer) const {
  const auto has_details = [](const Item& item) { return item.has_details; };
  if (std::none_of(items_.begin(), items_.end(), has_details)) return writer.nil();
  writer.array(items_.size());
  for (size_t i = 0; i < items_.size(); ++i) write_details_of(writer, i);
}

void Batch::write(Stub& stub, const wire::Block& block) {
  stub.answers().take_released(&released_, wire::kMaxPlaces);
  wire::encode<Kind::EXECUTE>(
      message_, number_, released_,
      [&](Writer& writer) {
        writer.array(1);
        block.write(writer);
      },
      Raw{layout_.bytes()}, [this](Writer& writer) { write_details(writer); }, std::nullopt);
  if (message_.bytes().size() <= wire::kMaxPacketBytes) return;
  char* memory;
  const uint64_t size = message_.bytes().size();
  const Spot spot = stub.loans().lend(size, &memory);
  std::memcpy(memory, message_.bytes().data(), size);
  wire::encode<Kind::INDIRECT>(message_, spot.region, spot.offset, size);
}

bool Batch::give(Stub& stub) {
  stub.open_requests().begin(++number_, requests_);
  stub.tell_log_levels();
  stub.take_back_late();
  lay_out();
  // The first block is for copies; where nothing is copied it is empty, in a region that there is.
  wire::Block block{stub.loans().first_region(), 0, 0};
  try {
    if (size_ > 0) {
      char* memory;
      const Spot spot = stub.loans().lend(size_, &memory);
      copy(memory);
      block = {spot.region, spot.offset, size_};
    }
    write(stub, block);
  } catch (const Failure&) {
    stub.loans().end_batch({});
    throw;
  }
  sent_ns_ = now_ns();
  const Channel::Sent sent = stub.work().send(message_.bytes());
  if (sent == Channel::Sent::kFull) throw Violation("it answers without reading");
  return sent == Channel::Sent::kDone;
}

void Batch::wait(Stub& stub) {
  const auto limit_ms = model_.execute_timeout_ms();
  bool is_overdue = false;
  for (;;) {
    const Channel::Received received = stub.work().receive(packet_, false);
    if (received == Channel::Received::kDone) return;
    if (received == Channel::Received::kGone) throw stub.death();
    stub.tell_cancelled();
    if (limit_ms && !is_overdue && now_ns() - sent_ns_ > *limit_ms * 1'000'000) {
      is_overdue = true;
      stub.overdue();
    }
  }
}

void Batch::finish(Stub& stub) {
  wait(stub);
  answered_ns_ = now_ns();
  std::string stored;
  auto message = decode(wire::kWork, wire::Side::STUB, packet_.bytes());
  if (message && message.kind() == Kind::INDIRECT) {
    const wire::Indirect where(message.fields);
    const View view = stub.answers().look({where.region, where.offset, where.size});
    stored.assign(view.bytes, view.size);
    stub.answers().release({where.region, where.offset});
    message = decode(wire::kWork, wire::Side::STUB, stored);
  }
  if (!message) throw Violation(message.wrong);
  if (message.kind() != Kind::ANSWER) {
    throw Violation(std::string(message.message->name) + " came in the place of ANSWER");
  }
  take_answer(stub, wire::Answer(message.fields));
}

void Batch::take_answer(Stub& stub, const wire::Answer& said) {
  const size_t count = items_.size();
  if (said.batch != number_) {
    throw Violation("an answer to batch " + std::to_string(said.batch) + " instead of " +
                    std::to_string(number_));
  }
  if ((said.remarks && said.remarks->size() != count) || (said.states && said.states->size() != count)) {
    throw Violation("remarks or states that are not those of " + std::to_string(count) + " requests");
  }
  answer_.read(said.layout.bytes, count);
  answer_.open(said.blocks, stub.answers(), &stub.loans());
  std::optional<List<std::optional<wire::Remarks>>::Iterator> remark;
  std::optional<List<uint64_t>::Iterator> state;
  if (said.remarks) remark.emplace(said.remarks->begin());
  if (said.states) state.emplace(said.states->begin());
  for (size_t i = 0; i < count; ++i) {
    items_[i].left = stub.open_requests().answered(i, state ? **state : wire::kAnswered);
    if (items_[i].left == OpenRequests::Left::kRespond) {
      respond(i, remark ? **remark : std::nullopt);
    }
    items_[i].is_answered = true;
    if (remark) ++*remark;
    if (state) ++*state;
  }
  stub.open_requests().end();
  answer_.release(stub.answers());
  stub.loans().end_batch(said.held);
  for (const wire::Place& place : said.released) stub.loans().take_back(place);
}

void Batch::respond(size_t i, const std::optional<wire::Remarks>& remarks) {
  triton::Response* response;
  check(triton::ResponseNew(&response, requests_[i]));
  items_[i].is_good = answer_.send(response, i, remarks, triton::kResponseFinal);
}

void Batch::close() noexcept {
  const uint64_t end_ns = now_ns();
  for (size_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    if (item.left != OpenRequests::Left::kReschedule) {
      complain(triton::ModelInstanceReportStatistics(instance_, requests_[i], item.is_good, start_ns_,
                                                     sent_ns_, answered_ns_, end_ns),
               "statistics cannot be reported");
    }
    if (item.left == OpenRequests::Left::kNothing) continue;
    const bool is_again = item.left == OpenRequests::Left::kReschedule;
    release(requests_[i], is_again ? triton::kReleaseReschedule : triton::kReleaseAll);
  }
  complain(triton::ModelInstanceReportBatchStatistics(instance_, rows_, start_ns_, sent_ns_,
                                                      answered_ns_, end_ns),
           "statistics cannot be reported");
}

void Batch::fail(const Failure& failure, Stub* stub) noexcept {
  for (size_t i = 0; i < items_.size(); ++i) {
    Item& item = items_[i];
    if (item.is_answered) continue;
    item.is_good = false;
    item.left = OpenRequests::Left::kRelease;
    if (stub && !stub->open_requests().deserted(i)) continue;
    triton::Response* response = nullptr;
    triton::Error* error = triton::ResponseNew(&response, requests_[i]);
    if (!error) send_failure(response, failure);
    complain(error, "an error cannot be sent");
  }
  if (stub) stub->open_requests().end();
}

void Batch::fail_alone(triton::Request* request, const Failure& failure) noexcept {
  triton::Response* response = nullptr;
  triton::Error* error = triton::ResponseNew(&response, request);
  if (!error) send_failure(response, failure);
  complain(error, "an error cannot be sent");
  complain(triton::ModelInstanceReportStatistics(instance_, request, false, start_ns_, start_ns_,
                                                 start_ns_, now_ns()),
           "statistics cannot be reported");
  release(request);
}

}  // namespace moonpool
