// Parcel: how the tensors of a Schema travel. A pure function of the schema, which both ends compute.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/message.h"
#include "engine/structure.h"
#include "plan/layout.h"

namespace hpcomm {

// Small tensors, and those that are cast, are packed into one buffer. Large ones travel as they are, each in an
// operation of its own in the same group: packing would cost a pass over memory and save nothing. A message of one
// tensor that is not cast needs no packing either. Empty tensors do not travel.
struct Parcel {
  explicit Parcel(const Schema& schema);

  struct Direct {
    std::size_t tensor = 0;  // in the schema
    std::size_t offset = 0;  // in the buffer that receives all of them
    std::size_t bytes = 0;
  };
  // Where the receiver has a tensor in the end: in which of its buffers, and at which byte.
  enum class Area { kNowhere, kPacked, kDirect, kCast };
  struct Place {
    Area area = Area::kNowhere;
    std::size_t offset = 0;
  };

  Layout packed;
  std::vector<std::size_t> packed_tensors;  // of each entry of `packed`: its tensor in the schema
  std::vector<Direct> direct;
  std::size_t direct_bytes = 0;  // each on a cache line
  std::size_t cast_bytes = 0;    // of the packed ones that are cast back, likewise
  std::vector<Place> places;     // by tensor

  // Of what travels: the packed part and the others.
  [[nodiscard]] std::size_t bytes() const noexcept { return packed.bytes() + direct_bytes; }
};

// What either end keeps of a schema that it met.
struct KnownSchema {
  std::uint64_t fingerprint = 0;
  std::string bytes;  // of encode_schema()
  Schema schema;
  Parcel parcel;
  std::optional<StructureSummary> summary;  // of the schema's; nothing where that is damaged

  // What it takes in memory, about: a number that both ends have in common.
  [[nodiscard]] std::size_t weight() const noexcept { return bytes.size() + kTensorWeight * schema.tensors.size(); }
  static constexpr std::size_t kTensorWeight = 256;

  // Throws Error(kProtocol) for bytes that are no schema. Faster if the structure is that of `like`, which may be null.
  [[nodiscard]] static std::shared_ptr<const KnownSchema> read(std::string_view bytes, std::uint64_t fingerprint,
                                                               const KnownSchema* like = nullptr);
};
using KnownPtr = std::shared_ptr<const KnownSchema>;

// The schemas that the receiver of an edge knows. Both ends forget the oldest where there are more than kMost, or where
// they weigh more than kMostWeight; never the newest. What they keep follows from what was sent, in order, so they
// always agree: another rule is another version of the header (message.cpp).
class SchemaBook {
 public:
  static constexpr std::size_t kMost = 64;
  static constexpr std::size_t kMostWeight = std::size_t{32} << 20;
  // Null when it is not known (any more).
  [[nodiscard]] KnownPtr find(std::uint64_t fingerprint) const;
  // Returns whether another one was forgotten.
  bool add(KnownPtr known);
  [[nodiscard]] std::size_t weight() const noexcept { return weight_; }

 private:
  [[nodiscard]] std::size_t place_of(std::uint64_t fingerprint) const noexcept;
  void forget(std::size_t place);

  std::vector<KnownPtr> known_;              // the oldest first
  std::vector<std::uint64_t> fingerprints_;  // of each: a search should not touch them all
  std::size_t weight_ = 0;
};

}  // namespace hpcomm
