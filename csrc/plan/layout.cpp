// Offsets of a Layout.
#include "plan/layout.h"

#include "base/hash.h"

namespace hpcomm {

namespace {

std::size_t round_up(std::size_t bytes) {
  return (bytes + Layout::kAlignment - 1) / Layout::kAlignment * Layout::kAlignment;
}

}  // namespace

Layout::Layout(const std::vector<TensorSize>& tensors, std::optional<DType> wire) {
  entries_.reserve(tensors.size());
  for (const TensorSize& tensor : tensors) {
    const bool cast = wire.has_value() && is_floating(tensor.dtype);
    Entry entry{bytes_, tensor.count, tensor.dtype, cast ? *wire : tensor.dtype};
    bytes_ += round_up(entry.wire_bytes());
    entries_.push_back(entry);
  }
}

bool Layout::is_plain() const noexcept {
  return entries_.size() == 1 && entries_.front().dtype == entries_.front().wire;
}

std::uint64_t Layout::fingerprint() const noexcept {
  Fingerprint hash;
  for (const Entry& entry : entries_) {
    hash.add_int(entry.offset).add_int(entry.count);
    hash.add_int(static_cast<std::uint64_t>(entry.dtype)).add_int(static_cast<std::uint64_t>(entry.wire));
  }
  return hash.value();
}

}  // namespace hpcomm
