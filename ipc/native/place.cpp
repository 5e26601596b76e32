#include "place.h"

#include <algorithm>

#include "wire.h"

namespace moonpool {
namespace {

// Returns the next multiple of `width`, a power of two.
uint64_t aligned(uint64_t offset, uint64_t width) { return (offset + width - 1) & ~(width - 1); }

}  // namespace

bool place(const std::vector<uint32_t>& counts, std::vector<PlacedTensor>& tensors, uint64_t* size) {
  // The greatest offset or size that a message may have.
  constexpr uint64_t kMost = INT64_MAX;
  const uint32_t most = counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
  uint64_t end = 0;
  for (uint32_t number = 0; number < most; ++number) {
    end = aligned(end, wire::kAlignment);
    PlacedTensor* first = tensors.data();
    for (const uint32_t count : counts) {
      if (number < count && first[number].block == 0) {
        PlacedTensor& tensor = first[number];
        // Another request may have another input at this number, so the datatype may change within a row.
        tensor.offset = aligned(end, std::max<uint64_t>(1, wire::kItemBytes[tensor.datatype]));
        // An empty tensor takes a byte, so that its block is a borrowed one.
        const uint64_t taken = std::max<uint64_t>(1, tensor.size);
        if (tensor.offset > kMost || taken > kMost - tensor.offset) return false;
        end = tensor.offset + taken;
      }
      first += count;
    }
  }
  *size = end;
  return end <= kMost;
}

void write_layout(Writer& writer, const std::vector<uint32_t>& counts, const std::vector<PlacedTensor>& tensors) {
  writer.array(counts.size());
  const PlacedTensor* tensor = tensors.data();
  for (const uint32_t count : counts) {
    writer.array(count);
    for (const PlacedTensor* const last = tensor + count; tensor != last; ++tensor) {
      write_tensor(writer, tensor->index, tensor->datatype, tensor->shape, tensor->dims, tensor->block, tensor->offset,
                   tensor->size);
    }
  }
}

}  // namespace moonpool
