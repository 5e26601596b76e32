// The answers of a stub: a layout and blocks, both checked, which become Triton's responses.
#pragma once

#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "api.h"
#include "memory.h"
#include "model.h"
#include "parameters.h"
#include "wire.h"

namespace moonpool {

// The outputs of some responses. The object is reused, so that its memory is. For one thread at a time.
class Answer {
 public:
  explicit Answer(const Model& model) : model_(model), names_(model.outputs()) {}

  // Reads a layout of at most so many responses, and returns their number. Throws Violation for outputs that fit no
  // blocks.
  size_t read(std::string_view layout, size_t responses) {
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
    return firsts_.size() - 1;
  }

  // Without outputs.
  void read_nothing() {
    layout_.clear();
    outputs_.clear();
    dims_.clear();
    blocks_.clear();
    firsts_.assign(2, 0);
  }

  // Maps the blocks of the layout, which lie in `answers` or, if `borrowed_blocks` are given, in those that the stub
  // has borrowed. Throws Violation unless all outputs lie within them.
  void open(const List<wire::Block>& blocks, Answers& answers, BorrowedBlocks* borrowed_blocks) {
    views_.clear();
    spots_.clear();
    if (blocks.size() > blocks_.size()) {
      throw Violation(std::to_string(blocks.size()) + " blocks for outputs that lie in " +
                      std::to_string(blocks_.size()));
    }
    for (const wire::Block& block : blocks) {
      if (borrowed_blocks && !answers.has(block.region)) {
        views_.push_back(borrowed_blocks->look(block));
        continue;
      }
      views_.push_back(answers.look(block));
      spots_.push_back({block.region, block.offset});
    }
    for (const Output& output : outputs_) {
      if (output.block >= views_.size()) {
        throw Violation("output '" + names_[output.name] + "' in block " + std::to_string(output.block) +
                        ": there is no such block");
      }
      const uint64_t size = views_[output.block].size;
      if (output.offset > size || output.size > size - output.offset) {
        throw Violation("output '" + names_[output.name] + "' reaches beyond its block");
      }
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
  // A row, its six fields, and as many dimensions as there may be.
  static constexpr uint64_t kValuesInRow = 7 + wire::kMaxDims;

  // Returns true if the bytes are so many strings, each after its length. They are a copy, which nobody changes.
  static bool is_strings(const char* bytes, uint64_t size, uint64_t count) {
    for (; count > 0; --count) {
      uint32_t length;
      if (size < wire::kLengthBytes) return false;
      std::memcpy(&length, bytes, sizeof length);
      if (size - wire::kLengthBytes < length) return false;
      bytes += wire::kLengthBytes + length;
      size -= wire::kLengthBytes + length;
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
      throw Violation("output " + std::to_string(row.index) + ": there is no such output");
    }
    for (size_t i = firsts_.back(); i < outputs_.size(); ++i) {
      if (outputs_[i].name == row.index) throw Violation("an output that is given twice");
    }
    const auto refuse = [&](const std::string& why) {
      throw Violation("output '" + names_[row.index] + "' of shape " + shown(row.shape) + why);
    };
    const auto elements = elements_of(row.shape);
    if (!elements) refuse(": more elements than any tensor has");
    const auto first = static_cast<uint32_t>(dims_.size());
    for (const uint64_t dim : row.shape) dims_.push_back(static_cast<int64_t>(dim));
    const int datatype = static_cast<int>(row.datatype);
    if (datatype != triton::kBytes && *elements * wire::kItemBytes[row.datatype] != row.size) {
      refuse(" has " + std::to_string(row.size) + " bytes");
    }
    outputs_.push_back({row.index, datatype, first, static_cast<uint32_t>(dims_.size()) - first, row.block, row.offset,
                        row.size, *elements});
    blocks_.insert(row.block);
  }

  void fill(triton::Response* response, size_t index) {
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
        broken_ = "output '" + name + "' does not hold the strings of its shape";
        throw Failure(triton::kInternal, broken_);
      }
    }
  }

  const Model& model_;
  const std::vector<std::string>& names_;
  std::string layout_;
  std::vector<Output> outputs_;
  std::vector<int64_t> dims_;
  // The blocks that hold outputs.
  std::set<uint64_t> blocks_;
  // The index of the first output of each response, and the index behind the last.
  std::vector<size_t> firsts_;
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
