// The rule, offsets, and what is kept of it.
#include "engine/parcel.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/host_memory.h"

namespace hpcomm {

namespace {

std::size_t on_a_line(std::size_t bytes) { return round_up(bytes, Layout::kAlignment); }

}  // namespace

Parcel::Parcel(const Schema& schema) : places(schema.tensors.size()) {
  std::size_t full = 0;
  for (const TensorSchema& tensor : schema.tensors) {
    full += tensor.count() > 0 ? 1 : 0;
  }
  std::vector<TensorSize> sizes;
  std::vector<DType> wires;
  sizes.reserve(full);
  wires.reserve(full);
  packed_tensors.reserve(full);
  for (std::size_t i = 0; i < schema.tensors.size(); ++i) {
    const TensorSchema& tensor = schema.tensors[i];
    const std::size_t bytes_of_it = tensor.count() * size_of(tensor.dtype);
    if (bytes_of_it == 0) {
      continue;
    }
    if (!tensor.is_cast() && (full == 1 || bytes_of_it >= schema.direct_from)) {
      direct.push_back({i, 0, bytes_of_it});
    } else {
      packed_tensors.push_back(i);
      sizes.push_back({tensor.count(), tensor.dtype});
      wires.push_back(tensor.wire());
    }
  }
  packed = Layout(sizes, wires);
  for (Direct& one : direct) {
    one.offset = direct_bytes;
    direct_bytes += on_a_line(one.bytes);
    places[one.tensor] = {Area::kDirect, one.offset};
  }
  for (std::size_t entry = 0; entry < packed_tensors.size(); ++entry) {
    const TensorSchema& tensor = schema.tensors[packed_tensors[entry]];
    Place& place = places[packed_tensors[entry]];
    if (tensor.is_cast()) {
      place = {Area::kCast, cast_bytes};
      cast_bytes += on_a_line(tensor.count() * size_of(tensor.dtype));
    } else {
      place = {Area::kPacked, packed.entries()[entry].offset};
    }
  }
}

KnownPtr KnownSchema::read(std::string_view bytes, std::uint64_t fingerprint, const KnownSchema* like) {
  Schema schema = parse_schema(bytes);
  Parcel parcel(schema);
  std::optional<StructureSummary> summary;
  if (like != nullptr && like->schema.structure == schema.structure) {
    summary = like->summary;
  } else {
    try {
      summary = summary_of(schema.structure);
    } catch (const Error&) {
      // Its messages can be received, if not built.
    }
  }
  return std::make_shared<const KnownSchema>(
      KnownSchema{fingerprint, std::string(bytes), std::move(schema), std::move(parcel), summary});
}

KnownPtr SchemaBook::find(std::uint64_t fingerprint) const {
  const std::size_t place = place_of(fingerprint);
  return place < known_.size() ? known_[place] : nullptr;
}

std::size_t SchemaBook::place_of(std::uint64_t fingerprint) const noexcept {
  const auto found = std::find(fingerprints_.begin(), fingerprints_.end(), fingerprint);
  return static_cast<std::size_t>(found - fingerprints_.begin());
}

bool SchemaBook::add(KnownPtr known) {
  const std::uint64_t fingerprint = known->fingerprint;
  const std::size_t before = known_.size();
  if (const std::size_t place = place_of(fingerprint); place < before) {
    forget(place);  // another one with its fingerprint, which nothing would find beside this one
  }
  weight_ += known->weight();
  known_.push_back(std::move(known));
  fingerprints_.push_back(fingerprint);
  while (known_.size() > 1 && (known_.size() > kMost || weight_ > kMostWeight)) {
    forget(0);
  }
  return known_.size() <= before;
}

void SchemaBook::forget(std::size_t place) {
  weight_ -= known_[place]->weight();
  known_.erase(known_.begin() + static_cast<std::ptrdiff_t>(place));
  fingerprints_.erase(fingerprints_.begin() + static_cast<std::ptrdiff_t>(place));
}

}  // namespace hpcomm
