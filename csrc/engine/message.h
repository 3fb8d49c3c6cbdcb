// Message: what travels on an Edge. A 64-byte header, a schema where the receiver does not know it yet, a payload.
// Header and schema go through Control ahead of the payload, so the receiver sizes its buffer before the data comes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "plan/layout.h"

namespace hpcomm {

struct TensorSchema {
  DType dtype = DType::kFloat32;
  bool requires_grad = false;
  std::vector<std::int64_t> shape;

  [[nodiscard]] std::size_t count() const noexcept;
  friend bool operator==(const TensorSchema&, const TensorSchema&) = default;
};

// Shape of a message: its tensors, and the structure around them (opaque here; the Python layer writes it).
struct Schema {
  std::string structure;
  std::vector<TensorSchema> tensors;

  [[nodiscard]] Layout layout() const;
  [[nodiscard]] std::uint64_t fingerprint() const;
  // "float32[8, 512] bfloat16[8]": for messages.
  [[nodiscard]] std::string to_text() const;
  friend bool operator==(const Schema&, const Schema&) = default;
};

struct MessageHeader {
  std::uint64_t edge = 0;
  std::uint64_t sequence = 0;
  std::int32_t microbatch = -1;
  std::uint64_t schema = 0;  // fingerprint
  std::uint64_t payload_bytes = 0;
  bool carries_schema = false;
};

inline constexpr std::size_t kHeaderBytes = 64;

[[nodiscard]] std::string encode_header(const MessageHeader& header);
[[nodiscard]] std::string encode_schema(const Schema& schema);

// Pure functions of untrusted bytes. They throw Error(kProtocol) for anything that the two above do not write, and
// allocate no more than a small multiple of what they are given.
[[nodiscard]] MessageHeader parse_header(std::string_view bytes);
[[nodiscard]] Schema parse_schema(std::string_view bytes);

}  // namespace hpcomm
