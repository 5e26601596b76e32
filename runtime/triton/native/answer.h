// What a stub answered: described by a layout, lying in blocks, both checked; and how it becomes Triton's response.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "api.h"
#include "memory.h"
#include "model.h"
#include "wire.h"

namespace moonpool {

// The outputs of some responses. Used again and again, so that its memory is. One thread at a time.
class Answer {
 public:
  explicit Answer(const Model& model) : model_(model), names_(model.outputs()) {}

  // What a layout of so many responses says. Throws Violation for what no blocks could hold.
  void read(std::string_view layout, size_t responses);
  // Without outputs.
  void read_nothing();
  // The blocks that the layout speaks of: `answers` has them; where there are `loans`, they may also have been lent to
  // the stub. Throws Violation unless all outputs lie within them.
  void open(const List<wire::Block>& blocks, Answers& answers, Loans* loans);
  // Give back what the stub has put aside for these responses, once they are copied.
  void release(Answers& answers);

  // Make outputs, parameters or the error of one response Triton's, and send it. Whatever happens, it is sent. False where
  // it was sent with an error.
  bool send(triton::Response* response, size_t index, const std::optional<wire::Remarks>& remarks,
            uint32_t flags) const;

 private:
  struct Output {
    size_t name;
    int datatype;
    uint32_t first_dim, dims;
    uint64_t block, offset, size;
    uint64_t elements;
  };
  void read_row(const wire::Tensor& row);
  void fill(triton::Response* response, size_t index) const;

  const Model& model_;
  const std::vector<std::string>& names_;
  std::string layout_;
  std::vector<Output> outputs_;
  std::vector<int64_t> dims_;
  // Where the outputs of each response begin, and behind the last.
  std::vector<size_t> firsts_;
  std::vector<View> views_;
  std::vector<Spot> spots_;
};

// Send an error in the place of a response of this request or factory; `make` is what makes those.
template <class Of>
void send_failure(Of* of, triton::Error* (*make)(triton::Response**, Of*), const Failure& failure) noexcept {
  triton::Response* response = nullptr;
  triton::Error* error = make(&response, of);
  if (!error) {
    triton::Error* told = triton::ErrorNew(failure.code, failure.what());
    error = triton::ResponseSend(response, triton::kResponseFinal, told);
    triton::ErrorDelete(told);
  }
  complain(error, "an error cannot be sent");
}

}  // namespace moonpool
