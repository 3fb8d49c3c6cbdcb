// Offsets of a Layout.
#include "plan/layout.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/host_memory.h"

namespace hpcomm {

namespace {

std::vector<DType> wire_types(const std::vector<TensorSize>& tensors, std::optional<DType> wire) {
  std::vector<DType> wires;
  wires.reserve(tensors.size());
  for (const TensorSize& tensor : tensors) {
    wires.push_back(wire.has_value() && is_floating(tensor.dtype) ? *wire : tensor.dtype);
  }
  return wires;
}

}  // namespace

Layout::Layout(const std::vector<TensorSize>& tensors, std::optional<DType> wire)
    : Layout(tensors, wire_types(tensors, wire)) {}

Layout::Layout(const std::vector<TensorSize>& tensors, const std::vector<DType>& wires) {
  HPCOMM_ASSERT(tensors.size() == wires.size(), tensors.size(), " tensors, ", wires.size(), " types");
  entries_.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Entry entry{bytes_, tensors[i].count, tensors[i].dtype, wires[i]};
    bytes_ += round_up(entry.wire_bytes(), Layout::kAlignment);
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
