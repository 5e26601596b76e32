// A request of a stub's model to another model: the server's request, the memory that it looks at, and its responses.
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

#include "api.h"
#include "calls.h"
#include "memory.h"
#include "parameters.h"
#include "wire.h"

namespace moonpool {

// Memory for an output of a response. It is the stub's as soon as the response was sent.
struct Lent {
  std::shared_ptr<Calls> calls;
  Spot spot;
  View view;
  bool is_sent = false;
};

// What a response that is no error says, and where it lies.
class Said {
 public:
  explicit Said(triton::InferenceResponse* response) : response_(response) {
    if (!response) return;
    check(triton::InferenceResponseParameterCount(response, &parameters_));
    uint32_t outputs;
    check(triton::InferenceResponseOutputCount(response, &outputs));
    if (parameters_ > wire::kMaxParameters || outputs > kMaxOutputs) {
      throw Failure(triton::kUnsupported, "the response has more in it than a model can be told");
    }
    for (uint32_t i = 0; i < outputs; ++i) outputs_.emplace_back(response, i);
  }
  // The rest of REPLY, behind `released`. Throws Failure.
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
  // The stub has it, and the memory with it.
  void was_sent() const {
    for (const Output& output : outputs_) output.lent->is_sent = true;
  }

 private:
  static constexpr uint32_t kMaxOutputs = 65'536;

  struct Output {
    Output(triton::InferenceResponse* response, uint32_t index) {
      const void* base;
      int memory_type;
      int64_t memory_type_id;
      void* allocated;
      check(triton::InferenceResponseOutput(response, index, &name, &datatype, &shape, &dims, &base, &size,
                                            &memory_type, &memory_type_id, &allocated));
      if (!allocated || dims > wire::kMaxDims) {
        throw Failure(triton::kUnsupported, "an output of the response cannot be told of");
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

// Lives until the server has let go of the request and its last response is there. Any thread may call any method.
class Inference : public std::enable_shared_from_this<Inference> {
 public:
  // `batch`: the one that the model executes, 0 for none.
  Inference(std::shared_ptr<Calls> calls, uint64_t call, uint64_t batch)
      : calls_(std::move(calls)), call_(call), batch_(batch) {}
  ~Inference() {
    if (request_) complain(triton::InferenceRequestDelete(request_), "a request cannot be deleted");
    let_go();
  }

  Inference(const Inference&) = delete;

  // Look at the memory that the stub names. Throws Violation.
  void hold(const List<wire::Block>& blocks, Loans& loans, Answers& answers) {
    for (const wire::Block& block : blocks) {
      const Spot spot{block.region, block.offset};
      if (answers.has(block.region)) {
        blocks_.push_back(answers.look(block));
        answers_.push_back(spot);
      } else {
        blocks_.push_back(loans.hold(block));
        loans_.push_back(spot);
      }
    }
  }

  // Give the request to the server; responses come from then on. Throws Failure, and Violation.
  // `trace` is for the request to own, or null.
  void start(const wire::Infer& asked, triton::Server* server, triton::Trace* trace) {
    make(asked, server);
    // Each is let go of by the function that it is given to.
    auto for_release = std::make_unique<std::shared_ptr<Inference>>(shared_from_this());
    auto for_responses = std::make_unique<std::shared_ptr<Inference>>(shared_from_this());
    check(triton::InferenceRequestSetReleaseCallback(request_, released, for_release.get()));
    check(triton::InferenceRequestSetResponseCallback(request_, allocator(), calls_.get(), responded,
                                                      for_responses.get()));
    triton::InferenceRequest* const request = request_;
    check(triton::ServerInferAsync(server, request, trace));
    for_release.release();
    for_responses.release();
    // `cancel` sets the flags in the opposite order, so at least one of the two sees both and tells the server.
    is_asked_ = true;
    if (is_cancelled_) tell_cancelled();
  }

  // Take room for the copy of its message, which lay in memory. Throws Failure.
  void take_room_for_message(uint64_t size) {
    calls_->take_room_for_message(size);
    message_bytes_ = size;
  }

  uint64_t batch() const { return batch_; }
  // The model that was asked may stop.
  void cancel() noexcept {
    // The server is told once, however often the stub cancels.
    if (!is_cancelled_.exchange(true) && is_asked_) tell_cancelled();
  }

 private:
  void tell_cancelled() noexcept {
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
    const auto elements = elements_of(input.shape);
    const uint64_t item = wire::kItemBytes[input.datatype];
    if (!elements || (item != 0 && *elements * item != input.size)) {
      refuse(input.name, "has " + std::to_string(input.size) + " bytes, which its shape has not");
    }
    shape_.clear();
    for (const uint64_t dimension : input.shape) shape_.push_back(static_cast<int64_t>(dimension));
    const std::string name(input.name);
    check(triton::InferenceRequestAddInput(request_, name.c_str(), static_cast<int>(input.datatype), shape_.data(),
                                           shape_.size()));
    const char* bytes = block.bytes + input.offset;
    if (input.datatype == triton::kBytes) {
      // Whoever reads these goes by the sizes in them, which the stub could change after they were looked at.
      calls_->take_room(input.size);
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

  void let_go() noexcept {
    copies_.clear();
    calls_->give_room_back(std::exchange(copied_bytes_, 0), std::exchange(message_bytes_, 0));
    calls_->release(answers_, loans_);
    answers_.clear();
    loans_.clear();
  }

  void respond(triton::InferenceResponse* response, bool is_final) {
    // A response of a request that still goes on, and that says nothing.
    if (!response && !is_final) return;
    try {
      if (triton::Error* error = response ? triton::InferenceResponseError(response) : nullptr) {
        const Failure failure(triton::ErrorCode(error), triton::ErrorMessage(error));
        calls_->reply(call_, is_final, Calls::only(failure));
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
    // One for all, for as long as the process lives.
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
    // The request itself stays until the last response: a decoupled model releases it early, and only by it can the model
    // be cancelled.
    (*inference)->let_go();
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
  // Those of the stub's own, which it gets back; and those that it was lent.
  std::vector<Spot> answers_, loans_;
  std::deque<std::string> copies_;
  uint64_t copied_bytes_ = 0, message_bytes_ = 0;
  std::vector<int64_t> shape_;

  triton::InferenceRequest* request_ = nullptr;
  // Before the server has it, a request cannot be cancelled.
  std::atomic<bool> is_asked_{false}, is_cancelled_{false};
};

}  // namespace moonpool
