// Answers of a stub: which outputs each response has, and where they lie. All of it is untrusted.
//
// Nothing here looks into a block. `read_answer` in runtime/stubs/layout.py refuses the same layouts with the same
// words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "msgpack.h"
#include "wire.h"

namespace moonpool {

// Checks what a stub says of a tensor, as `check_tensor` in ipc/tensors.py does: an array may have this shape, and its
// elements have so many bytes, unless they are BYTES. Sets their number. Else returns false, and `wrong` has what
// follows the name of the tensor in an error text.
bool check_tensor(const int64_t* shape, uint64_t dims, uint64_t datatype, uint64_t size, uint64_t* elements,
                  std::string* wrong);

// Returns true if the bytes are so many strings, each after its length. The stub must not be able to change them.
bool is_strings(const char* bytes, uint64_t size, uint64_t count);

// An output of a response, and its place.
struct OutputLayout {
  uint32_t index;  // among the model's outputs
  uint32_t datatype;
  uint32_t dims;
  size_t first_dim;  // of all outputs' dimensions
  uint64_t block, offset, size;
  uint64_t elements;
};

// The outputs of the responses in one answer after another. The object is reused, so that its memory is. For one thread
// at a time.
class AnswerLayout {
 public:
  // `names` are those of the model's outputs, for error texts. They outlive this.
  explicit AnswerLayout(const std::vector<std::string>& names) : names_(names), last_of_output_(names.size()) {}

  // Read the answer to a batch of so many requests, or a response that comes apart from it. If it breaks the protocol,
  // they return false, `wrong` says why, and what is here means nothing. Otherwise all outputs lie within the blocks
  // that it names, and no block is without outputs. The caller finds out if these blocks are the stub's.
  bool read(const wire::Answer& said, uint64_t batch, size_t requests, std::string* wrong);
  bool read(const wire::Response& said, std::string* wrong);

  size_t responses() const { return firsts_.size() - 1; }
  // The outputs of a response are those from `first(response)` to `first(response + 1)`.
  size_t first(size_t response) const { return firsts_[response]; }
  const std::vector<OutputLayout>& outputs() const { return outputs_; }
  const std::string& name(const OutputLayout& output) const { return names_[output.index]; }
  const int64_t* shape(const OutputLayout& output) const { return dims_.data() + output.first_dim; }

 private:
  void clear();
  bool read_layout(std::string_view packed, size_t responses, std::string* wrong);
  bool read_response(Reader& reader, std::string* wrong);
  bool add(const wire::Tensor& row, std::string* wrong);
  bool check_blocks(const List<wire::Block>& blocks, std::string* wrong);

  const std::vector<std::string>& names_;
  std::vector<OutputLayout> outputs_;
  std::vector<int64_t> dims_;
  // The index of the first output of each response, and the index behind the last.
  std::vector<size_t> firsts_{0, 0};
  // The last response that had an output, by the output, and the last answer that used a block, by the block. Both are
  // counted from the beginning. So nothing here is searched or cleared for a response, however many outputs and blocks
  // there are.
  std::vector<uint64_t> last_of_output_, last_of_block_;
  uint64_t response_ = 0, answer_ = 0;
  size_t used_blocks_ = 0;
  std::vector<uint64_t> sizes_;  // of the blocks
};

}  // namespace moonpool
