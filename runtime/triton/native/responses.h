// Triton's responses, made of what a stub answered.
#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "answer.h"
#include "api.h"
#include "memory.h"
#include "model.h"
#include "parameters.h"
#include "wire.h"

namespace moonpool {

// Makes the responses of one answer after another. The object is reused, so that its memory is. For one thread at a
// time.
class Responses {
 public:
  explicit Responses(const Model& model) : model_(model), layout_(model.outputs()) {}

  // Reads the answer to a batch, or a response that comes apart from it, as `AnswerLayout` does. Throws Violation for
  // one that breaks the protocol.
  template <class... Said>
  void read(const Said&... said) {
    std::string wrong;
    if (!layout_.read(said..., &wrong)) throw Violation(wrong);
  }

  // Maps the blocks that it names. They lie in `answers` or, if `borrowed_blocks` are given, in those that the stub has
  // borrowed. Throws Violation for any other.
  void open(const List<wire::Block>& blocks, Answers& answers, BorrowedBlocks* borrowed_blocks) {
    views_.clear();
    spots_.clear();
    for (const wire::Block& block : blocks) {
      if (borrowed_blocks && !answers.has(block.region)) {
        views_.push_back(borrowed_blocks->look(block));
        continue;
      }
      views_.push_back(answers.look(block));
      spots_.push_back({block.region, block.offset});
    }
  }

  // Release the stub's blocks of these responses, once they are copied.
  void release(Answers& answers) {
    for (const Spot& spot : spots_) answers.release(spot);
    spots_.clear();
    views_.clear();
  }

  // Throws Violation if a response had malformed strings. They can be checked only in the copy that was sent.
  void check_strings() {
    if (!broken_.empty()) throw Violation(std::exchange(broken_, {}));
  }

  // Make Triton's outputs, parameters or error of one response, and send it in any case. Returns false if it was sent
  // with an error.
  bool send(triton::Response* response, size_t index, const std::optional<wire::Remarks>& remarks,
            uint32_t flags) {
    triton::Error* error = guarded([&] {
      if (remarks && remarks->error) {
        throw Failure(static_cast<int>(remarks->error->code), model_.scrubbed(remarks->error->message));
      }
      fill(response, index);
      if (remarks && remarks->parameters) {
        const Setters<triton::Response> setters{triton::ResponseSetStringParameter, triton::ResponseSetIntParameter,
                                                triton::ResponseSetBoolParameter, triton::ResponseSetDoubleParameter};
        for (const Entry& entry : *remarks->parameters) set_parameter(response, setters, entry);
      }
    });
    complain(triton::ResponseSend(response, flags, error), "a response cannot be sent");
    if (error) triton::ErrorDelete(error);
    return !error;
  }

 private:
  void fill(triton::Response* response, size_t index) {
    for (size_t i = layout_.first(index); i < layout_.first(index + 1); ++i) {
      const OutputLayout& output = layout_.outputs()[i];
      const std::string& name = layout_.name(output);
      const int datatype = static_cast<int>(output.datatype);
      triton::Output* made;
      check(triton::ResponseOutput(response, &made, name.c_str(), datatype, layout_.shape(output), output.dims));
      void* buffer = nullptr;
      int memory_type = triton::kCpu;
      int64_t memory_type_id = 0;
      check(triton::OutputBuffer(made, &buffer, output.size, &memory_type, &memory_type_id));
      if (memory_type == triton::kGpu) {
        throw Failure(triton::kUnsupported,
                      "output '" + name + "' is wanted in GPU memory, which moonpool does not write");
      }
      if (output.size > 0) std::memcpy(buffer, views_[output.block].bytes + output.offset, output.size);
      if (datatype == triton::kBytes && !is_strings(static_cast<const char*>(buffer), output.size, output.elements)) {
        broken_ = "output '" + name + "' does not hold the strings of its shape";
        throw Failure(triton::kInternal, broken_);
      }
    }
  }

  const Model& model_;
  AnswerLayout layout_;
  std::string broken_;
  std::vector<View> views_;
  std::vector<Spot> spots_;
};

// Send an error as the response of this request or factory; `make` makes that response.
template <class Of>
void send_failure(Of* of, triton::Error* (*make)(triton::Response**, Of*), const Failure& failure) noexcept {
  triton::Response* response = nullptr;
  triton::Error* error = make(&response, of);
  if (!error) {
    triton::Error* error_sent = triton::ErrorNew(failure.code, failure.what());
    error = triton::ResponseSend(response, triton::kResponseFinal, error_sent);
    triton::ErrorDelete(error_sent);
  }
  complain(error, "an error cannot be sent");
}

}  // namespace moonpool
