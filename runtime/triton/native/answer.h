// What a stub answered: described by a layout, lying in blocks, both checked; and how it becomes Triton's response.
#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "api.h"
#include "memory.h"
#include "model.h"
#include "parameters.h"
#include "wire.h"

namespace moonpool {

// The outputs of some responses. Used again and again, so that its memory is. One thread at a time.
class Answer {
 public:
  explicit Answer(const Model& model) : model_(model), names_(model.outputs()) {}

  // What a layout of so many responses says. Throws Violation for what no blocks could hold.
  void read(std::string_view layout, size_t responses) {
    // An instance answers most batches in the same way.
    if (layout.empty() || layout != layout_) {
      const uint64_t most = 1 + (responses + 1) * (1 + (names_.size() + 1) * kValuesInRow);
      wire::Layout read;
      std::string wrong;
      if (!wire::read_layout(layout, most, &read, &wrong)) throw Violation(wrong);
      read_nothing();
      firsts_.clear();
      for (const List<wire::Tensor>& rows : read) {
        firsts_.push_back(outputs_.size());
        for (const wire::Tensor& row : rows) read_row(row);
      }
      firsts_.push_back(outputs_.size());
      layout_ = layout;
    }
    if (firsts_.size() != responses + 1) {
      throw Violation(std::to_string(firsts_.size() - 1) + " responses in the place of " + std::to_string(responses));
    }
  }

  // Without outputs.
  void read_nothing() {
    layout_.clear();
    outputs_.clear();
    dims_.clear();
    firsts_.assign(2, 0);
  }

  // The blocks that the layout speaks of: `answers` has them; where there are `loans`, they may also have been lent to
  // the stub. Throws Violation unless all outputs lie within them.
  void open(const List<wire::Block>& blocks, Answers& answers, Loans* loans) {
    views_.clear();
    spots_.clear();
    for (const wire::Block& block : blocks) {
      if (loans && !answers.has(block.region)) {
        views_.push_back(loans->look(block));
        continue;
      }
      views_.push_back(answers.look(block));
      spots_.push_back({block.region, block.offset});
    }
    for (const Output& output : outputs_) {
      const uint64_t size = output.block < views_.size() ? views_[output.block].size : 0;
      if (output.block >= views_.size() || output.offset > size || output.size > size - output.offset) {
        throw Violation("output '" + names_[output.name] + "' does not lie in its block");
      }
    }
  }

  // Give back what the stub has put aside for these responses, once they are copied.
  void release(Answers& answers) {
    for (const Spot& spot : spots_) answers.release(spot);
    spots_.clear();
    views_.clear();
  }

  // Make outputs, parameters or the error of one response Triton's, and send it. Whatever happens, it is sent. False where
  // it was sent with an error.
  bool send(triton::Response* response, size_t index, const std::optional<wire::Remarks>& remarks,
            uint32_t flags) const {
    triton::Error* error = guarded([&] {
      if (remarks && remarks->error) {
        throw Failure(static_cast<int>(remarks->error->code), model_.told(remarks->error->message));
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
  // A row, its six fields, and as many dimensions as there may be.
  static constexpr uint64_t kValuesInRow = 7 + wire::kMaxDims;
  static constexpr uint64_t kLengthBytes = 4;

  // Whether the bytes are so many strings, each led by its length. They are a copy: nobody changes them.
  static bool is_strings(const char* bytes, uint64_t size, uint64_t count) {
    for (; count > 0; --count) {
      uint32_t length;
      if (size < kLengthBytes) return false;
      std::memcpy(&length, bytes, sizeof length);
      if (size - kLengthBytes < length) return false;
      bytes += kLengthBytes + length;
      size -= kLengthBytes + length;
    }
    return size == 0;
  }

  struct Output {
    size_t name;
    int datatype;
    uint32_t first_dim, dims;
    uint64_t block, offset, size;
    uint64_t elements;
  };
  void read_row(const wire::Tensor& row) {
    if (row.index >= names_.size()) {
      throw Violation("output " + std::to_string(row.index) + ": there is none such");
    }
    const auto refuse = [&](const std::string& why) { throw Violation("output '" + names_[row.index] + "' " + why); };
    for (size_t i = firsts_.back(); i < outputs_.size(); ++i) {
      if (outputs_[i].name == row.index) refuse("is given twice");
    }
    const auto elements = elements_of(row.shape);
    if (!elements) refuse("has more elements than any tensor");
    const auto first = static_cast<uint32_t>(dims_.size());
    for (const uint64_t dim : row.shape) dims_.push_back(static_cast<int64_t>(dim));
    const int datatype = static_cast<int>(row.datatype);
    if (datatype != triton::kBytes && *elements * wire::kItemBytes[row.datatype] != row.size) {
      refuse("has " + std::to_string(row.size) + " bytes, which its shape has not");
    }
    outputs_.push_back({row.index, datatype, first, static_cast<uint32_t>(dims_.size()) - first, row.block, row.offset,
                        row.size, *elements});
  }

  void fill(triton::Response* response, size_t index) const {
    for (size_t i = firsts_[index]; i < firsts_[index + 1]; ++i) {
      const Output& output = outputs_[i];
      const std::string& name = names_[output.name];
      triton::Output* made;
      check(triton::ResponseOutput(response, &made, name.c_str(), output.datatype, dims_.data() + output.first_dim,
                                   output.dims));
      void* buffer = nullptr;
      int memory_type = triton::kCpu;
      int64_t memory_type_id = 0;
      check(triton::OutputBuffer(made, &buffer, output.size, &memory_type, &memory_type_id));
      if (memory_type == triton::kGpu) {
        throw Failure(triton::kUnsupported,
                      "output '" + name + "' is wanted in GPU memory, which moonpool does not write");
      }
      if (output.size == 0) continue;
      std::memcpy(buffer, views_[output.block].bytes + output.offset, output.size);
      if (output.datatype == triton::kBytes &&
          !is_strings(static_cast<const char*>(buffer), output.size, output.elements)) {
        throw Failure(triton::kInternal, "output '" + name + "' does not hold the strings of its shape");
      }
    }
  }

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
