#include "answer.h"

#include <cstring>
#include <utility>

namespace moonpool {
namespace {

// A row, its six fields, and as many dimensions as there may be.
constexpr uint64_t kValuesInRow = 7 + wire::kMaxDims;

bool refuse(std::string* wrong, std::string why) {
  *wrong = std::move(why);
  return false;
}

std::string shown(const int64_t* shape, uint64_t dims) {
  std::string text;
  for (uint64_t i = 0; i < dims; ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return "of shape [" + text + "]";
}

}  // namespace

bool check_tensor(const int64_t* shape, uint64_t dims, uint64_t datatype, uint64_t size, uint64_t* elements,
                  std::string* wrong) {
  // numpy makes no array whose other dimensions are huge, beside one of 0. Within this limit, a signed number of 64
  // bits counts the bytes, too: an element has at most eight.
  uint64_t count = 1, bound = 1;
  for (uint64_t i = 0; i < dims; ++i) {
    const auto dimension = static_cast<uint64_t>(shape[i]);
    count *= dimension;
    if (dimension == 0) continue;
    if (bound > wire::kMaxElements / dimension) {
      return refuse(wrong, shown(shape, dims) + ": more elements than any tensor has");
    }
    bound *= dimension;
  }
  *elements = count;
  if (datatype == wire::kBytes || count * wire::kItemBytes[datatype] == size) return true;
  return refuse(wrong, shown(shape, dims) + " has " + std::to_string(size) + " bytes");
}

bool is_strings(const char* bytes, uint64_t size, uint64_t count) {
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

bool AnswerLayout::read(const wire::Answer& said, uint64_t batch, size_t requests, std::string* wrong) {
  if (!read_layout(said.layout.bytes, requests, wrong)) return false;
  const auto wanted = [&](const char* what) { return std::to_string(requests) + what; };
  if (said.batch != batch || responses() != requests) {
    return refuse(wrong, "an answer to batch " + std::to_string(said.batch) + " with " + std::to_string(responses()) +
                             " responses; batch " + std::to_string(batch) + " has " + wanted(" requests"));
  }
  if (!check_blocks(said.blocks, wrong)) return false;
  if (said.remarks && said.remarks->size() != requests) {
    return refuse(wrong, std::to_string(said.remarks->size()) + " remarks on " + wanted(" responses"));
  }
  if (said.states && said.states->size() != requests) {
    return refuse(wrong, std::to_string(said.states->size()) + " states of " + wanted(" requests"));
  }
  return true;
}

bool AnswerLayout::read(const wire::Response& said, std::string* wrong) {
  clear();
  if (!said.layout && !said.remarks && (said.flags == 0 || !said.blocks.empty())) {
    return refuse(wrong, "an empty response");
  }
  if (said.layout && !read_layout(said.layout->bytes, 1, wrong)) return false;
  if (responses() != 1) return refuse(wrong, std::to_string(responses()) + " responses in the place of one");
  return check_blocks(said.blocks, wrong);
}

bool AnswerLayout::read_layout(std::string_view packed, size_t responses, std::string* wrong) {
  clear();
  // One response and one output too many are let through here: the checks for them give a clearer error.
  const uint64_t most = 1 + (responses + 1) * (1 + (names_.size() + 1) * kValuesInRow);
  if (!wire::check_layout(packed, most, wrong)) return false;
  Reader reader(packed);
  firsts_.resize(1);
  for (uint32_t left = reader.array(); left > 0; --left) {
    if (!read_response(reader, wrong)) return false;
    firsts_.push_back(outputs_.size());
  }
  return true;
}

bool AnswerLayout::check_blocks(const List<wire::Block>& blocks, std::string* wrong) {
  if (blocks.size() > used_blocks_) {
    return refuse(wrong, std::to_string(blocks.size()) + " blocks for outputs that lie in " +
                             std::to_string(used_blocks_));
  }
  sizes_.clear();
  for (const wire::Block& block : blocks) sizes_.push_back(block.size);
  for (const OutputLayout& output : outputs_) {
    if (output.block >= sizes_.size()) {
      return refuse(wrong, "output '" + name(output) + "' in block " + std::to_string(output.block) +
                               ": there is no such block");
    }
    if (output.offset + output.size > sizes_[output.block]) {
      return refuse(wrong, "output '" + name(output) + "' reaches beyond its block");
    }
  }
  return true;
}

void AnswerLayout::clear() {
  ++answer_;
  used_blocks_ = 0;
  outputs_.clear();
  dims_.clear();
  firsts_.assign(2, 0);
}

bool AnswerLayout::read_response(Reader& reader, std::string* wrong) {
  ++response_;
  bool is_twice = false;
  for (uint32_t left = reader.array(); left > 0; --left) {
    wire::Tensor row;
    row.read(reader);
    if (row.index >= names_.size()) {
      return refuse(wrong, "output " + std::to_string(row.index) + ": there is no such output");
    }
    if (!add(row, wrong)) return refuse(wrong, "output '" + names_[row.index] + "' " + *wrong);
    is_twice = is_twice || last_of_output_[row.index] == response_;
    last_of_output_[row.index] = response_;
  }
  return !is_twice || refuse(wrong, "an output that is given twice");
}

bool AnswerLayout::add(const wire::Tensor& row, std::string* wrong) {
  OutputLayout& output = outputs_.emplace_back(
      OutputLayout{static_cast<uint32_t>(row.index), static_cast<uint32_t>(row.datatype), row.shape.size(),
                   dims_.size(), row.block, row.offset, row.size, 0});
  for (const uint64_t dimension : row.shape) dims_.push_back(static_cast<int64_t>(dimension));
  if (!check_tensor(shape(output), output.dims, row.datatype, row.size, &output.elements, wrong)) return false;
  if (row.block >= last_of_block_.size()) last_of_block_.resize(row.block + 1);
  used_blocks_ += last_of_block_[row.block] != answer_;
  last_of_block_[row.block] = answer_;
  return true;
}

}  // namespace moonpool
