// A request of a stub's model to another model: the server's request, the memory that it reads, and its responses.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "answer.h"
#include "api.h"
#include "calls.h"
#include "memory.h"
#include "parameters.h"
#include "place.h"
#include "wire.h"

namespace moonpool {

// Memory for an output of a response. The stub owns it once the response was sent.
struct Lent {
  std::shared_ptr<Calls> calls;
  Spot spot;
  View view;
  bool is_sent = false;
};

// The contents of a response that is not an error, and their places.
class Said {
 public:
  explicit Said(triton::InferenceResponse* response) : response_(response) {
    if (!response) return;
    check(triton::InferenceResponseParameterCount(response, &parameters_));
    uint32_t outputs;
    check(triton::InferenceResponseOutputCount(response, &outputs));
    if (parameters_ > wire::kMaxParameters || outputs > wire::kMaxTensors) {
      throw Failure(triton::kUnsupported,
                    "the response has more parameters or outputs than a message to a model may have");
    }
    for (uint32_t i = 0; i < outputs; ++i) outputs_.emplace_back(response, i);
  }
  // Writes the rest of REPLY, behind `released`. Throws Failure.
  void write(Writer& writer) const {
    writer.array(outputs_.size());
    for (const Output& output : outputs_) {
      wire::Block{output.lent->spot.region, output.lent->spot.offset, output.size}.write(writer);
    }
    writer.array(outputs_.size());
    for (size_t block = 0; block < outputs_.size(); ++block) {
      const Output& output = outputs_[block];
      write_tensor(writer, output.name, output.datatype, output.shape, output.dims, block, 0, output.size);
    }
    write_parameters(writer, parameters_, [this](uint32_t i, auto... found) {
      return triton::InferenceResponseParameter(response_, i, found...);
    });
    writer.nil();
  }
  // Note that the response was sent, so the stub owns the memory now.
  void was_sent() const {
    for (const Output& output : outputs_) output.lent->is_sent = true;
  }

 private:
  struct Output {
    Output(triton::InferenceResponse* response, uint32_t index) {
      const void* base;
      int memory_type;
      int64_t memory_type_id;
      void* allocated;
      check(triton::InferenceResponseOutput(response, index, &name, &datatype, &shape, &dims, &base, &size,
                                            &memory_type, &memory_type_id, &allocated));
      if (!allocated || dims > wire::kMaxDims) {
        throw Failure(triton::kUnsupported,
                      "an output of the response has no memory, or more dimensions than a message may have");
      }
      lent = static_cast<Lent*>(allocated);
    }
    const char* name;
    int datatype;
    const int64_t* shape;
    uint64_t dims;
    size_t size;
    Lent* lent;
  };

  triton::InferenceResponse* const response_;
  uint32_t parameters_ = 0;
  std::vector<Output> outputs_;
};

// Lives until the server has released the request and its last response has come. Any thread may call any method.
class Inference : public std::enable_shared_from_this<Inference> {
 public:
  // `batch` is the number of the batch that the model executes, 0 for none.
  Inference(std::shared_ptr<Calls> calls, uint64_t call, uint64_t batch)
      : calls_(std::move(calls)), call_(call), batch_(batch) {}
  ~Inference() {
    if (request_) complain(triton::InferenceRequestDelete(request_), "a request cannot be deleted");
    release_memory();
  }

  Inference(const Inference&) = delete;

  // Pin the memory that the stub names as inputs. Throws Violation.
  void hold(const List<wire::Block>& blocks, BorrowedBlocks& borrowed_blocks, Answers& answers) {
    for (const wire::Block& block : blocks) {
      const Spot spot{block.region, block.offset};
      if (answers.has(block.region)) {
        blocks_.push_back(answers.look(block));
        answers_.push_back(spot);
      } else {
        blocks_.push_back(borrowed_blocks.hold(block));
        borrowed_blocks_.push_back(spot);
      }
    }
  }

  // Give the request to the server, whose responses may come at once. The request takes over `trace`, which may be
  // null. Throws Failure, and Violation.
  void start(const wire::Infer& asked, triton::Server* server, triton::Trace* trace) {
    make(asked, server);
    // The callback that gets a holder deletes it.
    auto for_release = std::make_unique<std::shared_ptr<Inference>>(shared_from_this());
    auto for_responses = std::make_unique<std::shared_ptr<Inference>>(shared_from_this());
    check(triton::InferenceRequestSetReleaseCallback(request_, released, for_release.get()));
    check(triton::InferenceRequestSetResponseCallback(request_, allocator(), calls_.get(), responded,
                                                      for_responses.get()));
    triton::InferenceRequest* const request = request_;
    check(triton::ServerInferAsync(server, request, trace));
    for_release.release();
    for_responses.release();
    // `cancel` sets the flags in the opposite order, so at least one of the two sees both, and cancels in the server.
    is_asked_ = true;
    if (is_cancelled_) cancel_in_server();
  }

  // Charge the copy budget for the message, which lay in memory. Throws Failure.
  void charge_for_message(uint64_t size) {
    calls_->charge_for_message(size);
    message_bytes_ = size;
  }

  uint64_t batch() const { return batch_; }
  // Cancel the request, so that the called model may stop.
  void cancel() noexcept {
    // Cancel in the server once, however often the stub cancels.
    if (!is_cancelled_.exchange(true) && is_asked_) cancel_in_server();
  }

 private:
  void cancel_in_server() noexcept {
    if (!triton::InferenceRequestCancel) return;
    complain(triton::InferenceRequestCancel(request_), "a request cannot be cancelled");
  }

  static constexpr size_t kMaxShownName = 80;

  static triton::Error* allocate(triton::ResponseAllocator*, const char*, size_t size, int, int64_t, void* calls,
                                 void** buffer, void** lent, int* memory_type, int64_t* memory_type_id) {
    return guarded([&] {
      auto made = std::make_unique<Lent>();
      made->calls = static_cast<Calls*>(calls)->shared_from_this();
      made->view = made->calls->lend(size, &made->spot);
      *buffer = const_cast<char*>(made->view.bytes);
      *memory_type = triton::kCpu;
      *memory_type_id = 0;
      *lent = made.release();
    });
  }

  static triton::Error* deallocate(triton::ResponseAllocator*, void*, void* buffer, size_t, int, int64_t) {
    const std::unique_ptr<Lent> lent(static_cast<Lent*>(buffer));
    if (!lent->is_sent) lent->calls->take_back(lent->spot);
    return nullptr;
  }

  [[noreturn]] static void refuse(std::string_view input, const std::string& why) {
    throw Violation("input '" + std::string(input.substr(0, kMaxShownName)) + "' " + why);
  }

  void make(const wire::Infer& asked, triton::Server* server) {
    const std::string model(asked.model);
    check(triton::InferenceRequestNew(&request_, server, model.c_str(), asked.version));
    for (const wire::NamedTensor& input : asked.inputs) add_input(input);
    for (const std::string_view output : asked.outputs) {
      check(triton::InferenceRequestAddRequestedOutput(request_, std::string(output).c_str()));
    }
    if (asked.timeout_us > 0) {
      check(triton::InferenceRequestSetTimeoutMicroseconds(request_, asked.timeout_us));
    }
    if (asked.details) set_details(*asked.details);
  }

  void add_input(const wire::NamedTensor& input) {
    if (input.block >= blocks_.size()) refuse(input.name, "does not lie in its block");
    const View& block = blocks_[input.block];
    if (input.offset > block.size || input.size > block.size - input.offset) {
      refuse(input.name, "does not lie in its block");
    }
    shape_.clear();
    for (const uint64_t dimension : input.shape) shape_.push_back(static_cast<int64_t>(dimension));
    uint64_t elements;
    std::string wrong;
    if (!check_tensor(shape_.data(), shape_.size(), input.datatype, input.size, &elements, &wrong)) {
      refuse(input.name, wrong);
    }
    const std::string name(input.name);
    check(triton::InferenceRequestAddInput(request_, name.c_str(), static_cast<int>(input.datatype), shape_.data(),
                                           shape_.size()));
    const char* bytes = block.bytes + input.offset;
    if (input.datatype == triton::kBytes) {
      // The reader of strings follows the lengths in them. The stub could change these after the check, so check and
      // read a copy.
      calls_->charge_for_strings(input.size);
      copied_bytes_ += input.size;
      copies_.emplace_back(bytes, input.size);
      bytes = copies_.back().data();
    }
    check(triton::InferenceRequestAppendInputData(request_, name.c_str(), bytes, input.size, triton::kCpu, 0));
  }

  void set_details(const wire::InferDetails& details) {
    check(triton::InferenceRequestSetId(request_, std::string(details.request_id).c_str()));
    const Value& correlation = details.correlation_id;
    if (correlation.form == Form::kText) {
      check(triton::InferenceRequestSetCorrelationIdString(request_, std::string(correlation.bytes).c_str()));
    } else if (correlation.number != 0) {
      check(triton::InferenceRequestSetCorrelationId(request_, correlation.number));
    }
    check(triton::InferenceRequestSetFlags(request_, static_cast<uint32_t>(details.flags)));
    if (!details.parameters) return;
    const Setters<triton::InferenceRequest> setters{
        triton::InferenceRequestSetStringParameter, triton::InferenceRequestSetIntParameter,
        triton::InferenceRequestSetBoolParameter, triton::InferenceRequestSetDoubleParameter};
    for (const Entry& entry : *details.parameters) set_parameter(request_, setters, entry);
  }

  void release_memory() noexcept {
    copies_.clear();
    calls_->give_copies_back(std::exchange(copied_bytes_, 0), std::exchange(message_bytes_, 0));
    calls_->release(answers_, borrowed_blocks_);
    answers_.clear();
    borrowed_blocks_.clear();
  }

  void respond(triton::InferenceResponse* response, bool is_final) {
    // A response without contents, of a request that is not complete.
    if (!response && !is_final) return;
    try {
      if (triton::Error* error = response ? triton::InferenceResponseError(response) : nullptr) {
        const Failure failure(triton::ErrorCode(error), triton::ErrorMessage(error));
        calls_->reply(call_, is_final, Calls::only(calls_->readable(failure)));
        return;
      }
      const Said said(response);
      if (calls_->reply(call_, is_final, [&](Writer& writer) { said.write(writer); })) {
        said.was_sent();
      }
    } catch (const Failure& failure) {
      calls_->fail(call_, failure);
    } catch (const std::exception& error) {
      calls_->fail(call_, Failure(triton::kInternal, error.what()));
    }
  }

  static triton::ResponseAllocator* allocator() {
    // One allocator for all requests, which is never deleted.
    static triton::ResponseAllocator* const shared = [] {
      triton::ResponseAllocator* made;
      check(triton::ResponseAllocatorNew(&made, allocate, deallocate, nullptr));
      return made;
    }();
    return shared;
  }

  static void released(triton::InferenceRequest*, uint32_t flags, void* holder) noexcept {
    if ((flags & triton::kReleaseAll) == 0) return;
    const std::unique_ptr<std::shared_ptr<Inference>> inference(static_cast<std::shared_ptr<Inference>*>(holder));
    // Keep the request until the last response. A decoupled model releases it early, and cancelling it needs the
    // request.
    (*inference)->release_memory();
  }

  static void responded(triton::InferenceResponse* response, uint32_t flags, void* holder) noexcept {
    auto* const inference = static_cast<std::shared_ptr<Inference>*>(holder);
    const bool is_final = (flags & triton::kResponseFinal) != 0;
    (*inference)->respond(response, is_final);
    if (response) complain(triton::InferenceResponseDelete(response), "a response cannot be deleted");
    if (is_final) delete inference;
  }

  const std::shared_ptr<Calls> calls_;
  const uint64_t call_, batch_;
  std::vector<View> blocks_;
  // Blocks in the stub's own memory, which are returned to it, and blocks that it borrowed.
  std::vector<Spot> answers_, borrowed_blocks_;
  std::deque<std::string> copies_;
  uint64_t copied_bytes_ = 0, message_bytes_ = 0;
  std::vector<int64_t> shape_;

  triton::InferenceRequest* request_ = nullptr;
  // A request cannot be cancelled before the server has it.
  std::atomic<bool> is_asked_{false}, is_cancelled_{false};
};

}  // namespace moonpool
