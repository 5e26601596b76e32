#include "answer.h"

#include <cstring>

#include "parameters.h"

namespace moonpool {
namespace {

// A row, its six fields, and as many dimensions as there may be.
constexpr uint64_t kValuesInRow = 7 + wire::kMaxDims;
constexpr uint64_t kLengthBytes = 4;

// Whether the bytes are so many strings, each led by its length. They are a copy: nobody changes them.
bool is_strings(const char* bytes, uint64_t size, uint64_t count) {
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

}  // namespace

void Answer::read(std::string_view layout, size_t responses) {
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

void Answer::read_nothing() {
  layout_.clear();
  outputs_.clear();
  dims_.clear();
  firsts_.assign(2, 0);
}

void Answer::read_row(const wire::Tensor& row) {
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

void Answer::open(const List<wire::Block>& blocks, Answers& answers, Loans* loans) {
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

void Answer::release(Answers& answers) {
  for (const Spot& spot : spots_) answers.release(spot);
  spots_.clear();
  views_.clear();
}

void Answer::fill(triton::Response* response, size_t index) const {
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

bool Answer::send(triton::Response* response, size_t index, const std::optional<wire::Remarks>& remarks,
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

}  // namespace moonpool
