// Message: what travels on an Edge. A 64-byte header, a schema where the receiver does not know it yet, a payload.
// Header and schema go ahead of the payload or together with it, through Control or a mailbox (lane_route.h,
// mail_route.h), so the receiver knows the sizes before it makes room for tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "engine/dims.h"

namespace hpcomm {

struct TensorSchema {
  DType dtype = DType::kFloat32;
  bool requires_grad = false;
  Dims shape;
  // The real floating point type that it is cast to on the way, if it is.
  std::optional<DType> cast = std::nullopt;
  // The dimensions as they lie in memory, the outermost first; empty where that is their own order.
  std::vector<std::uint8_t> order = {};

  [[nodiscard]] std::size_t count() const noexcept;
  [[nodiscard]] bool is_cast() const noexcept { return cast.has_value(); }
  [[nodiscard]] DType wire() const noexcept { return cast.value_or(dtype); }
  // Of its dense memory, in elements.
  [[nodiscard]] std::vector<std::int64_t> strides() const;
  // "float32[8, 512]": for messages.
  [[nodiscard]] std::string to_text() const;
  friend bool operator==(const TensorSchema&, const TensorSchema&) = default;
};

// Measured by `python -m benchmarks.p2p --tune`; edge.h has what else was.
inline constexpr std::uint64_t kDirectFrom = std::uint64_t{2} << 20;

// Shape of a message: its tensors, and the structure around them, which csrc/torch/tree.cpp writes.
struct Schema {
  std::string structure;  // engine/structure.h
  std::vector<TensorSchema> tensors;
  // Tensors of so many bytes and more travel as they are, smaller ones packed (engine/parcel.h). Part of the schema, so
  // that both ends take it from the same place.
  std::uint64_t direct_from = kDirectFrom;

  [[nodiscard]] std::uint64_t fingerprint() const;
  // "float32[8, 512] bfloat16[8]": for messages.
  [[nodiscard]] std::string to_text() const;
  friend bool operator==(const Schema&, const Schema&) = default;
};

// How `found` differs from `expected`, by the name of the first leaf that does: "message['h']: float32[4] instead of
// float32[3]". Empty when structures, dtypes and shapes are the same. kKinds takes no notice of values: of numbers and
// texts only what they are counts, of tensors neither wire types nor requires_grad nor the order in memory.
enum class Compare { kEverything, kKinds };
[[nodiscard]] std::string difference(const Schema& found, const Schema& expected, Compare what);

// True when they differ in shapes and orders at most: what was made for one can be given the sizes of the other.
[[nodiscard]] bool same_but_shapes(const Schema& one, const Schema& other) noexcept;

struct MessageHeader {
  std::uint64_t edge = 0;
  std::uint64_t sequence = 0;
  std::int32_t microbatch = -1;
  std::uint64_t schema = 0;         // fingerprint
  std::uint64_t payload_bytes = 0;  // of the Parcel
  std::uint32_t schema_bytes = 0;   // that follow; 0 when the receiver knows the schema
  // The packed part lies in the sender's memory at this place, and is the receiver's until it gives it back.
  struct Lent {
    std::uint32_t segment = 0;
    std::uint64_t offset = 0;
    friend bool operator==(const Lent&, const Lent&) = default;
  };
  std::optional<Lent> lent;
  // The sender's schema is frozen: no header follows but where the route has them all the same.
  bool frozen = false;

  friend bool operator==(const MessageHeader&, const MessageHeader&) = default;
};

inline constexpr std::size_t kHeaderBytes = 64;
// No schema is longer, so a damaged length cannot make a rank allocate.
inline constexpr std::size_t kMaxSchemaBytes = std::size_t{16} << 20;
inline constexpr std::size_t kMaxDimensions = 64;  // of a tensor

[[nodiscard]] std::string encode_header(const MessageHeader& header);
// The same kHeaderBytes to `target`.
void write_header(const MessageHeader& header, char* target);
[[nodiscard]] std::string encode_schema(const Schema& schema);
// Of what encode_schema() writes.
[[nodiscard]] std::uint64_t fingerprint_of(std::string_view schema);

// Writes what encode_schema() writes, without a Schema: a sender looks at every message, and most are like the last.
class SchemaWriter {
 public:
  // Replaces what is in `bytes`; `tensors` calls of add() follow.
  SchemaWriter(std::string& bytes, std::string_view structure, std::uint64_t direct_from, std::size_t tensors);
  // `order`: as TensorSchema's, of so many dimensions; null for their own.
  void add(DType dtype, DType wire, bool requires_grad, const std::int64_t* shape, std::size_t dimensions,
           const std::uint8_t* order = nullptr);

 private:
  std::string& bytes_;
};

// Pure functions of untrusted bytes. They throw Error(kProtocol) for anything that the two above do not write, and
// allocate no more than a small multiple of what they are given.
[[nodiscard]] MessageHeader parse_header(std::string_view bytes);
[[nodiscard]] Schema parse_schema(std::string_view bytes);

}  // namespace hpcomm
