// Wire form of headers and schemas, little endian, with a CRC over the header.
#include "engine/message.h"

#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/hash.h"

namespace hpcomm {

static_assert(std::endian::native == std::endian::little, "the wire format is written for little-endian machines");

namespace {

constexpr std::uint32_t kMagic = 0x676d6368;  // "hcmg"
constexpr std::uint16_t kVersion = 1;
constexpr std::uint16_t kCarriesSchema = 1;
constexpr std::size_t kMaxDimensions = 64;

struct WireHeader {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t flags = 0;
  std::uint64_t edge = 0;
  std::uint64_t sequence = 0;
  std::uint64_t schema = 0;
  std::uint64_t payload_bytes = 0;
  std::int32_t microbatch = -1;
  std::array<std::uint32_t, 4> reserved{};
  std::uint32_t crc = 0;  // of everything before it
};
static_assert(sizeof(WireHeader) == kHeaderBytes);

[[noreturn]] void reject(const std::string& why) { throw Error(ErrorKind::kProtocol, "message " + why); }

// CRC-32 (IEEE 802.3, reflected), bit by bit: sixty bytes need no table.
std::uint32_t crc32(const void* data, std::size_t bytes) noexcept {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint32_t crc = 0xffffffffU;
  for (std::size_t i = 0; i < bytes; ++i) {
    crc ^= p[i];
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ (0xedb88320U & (0U - (crc & 1U)));
    }
  }
  return ~crc;
}

template <typename T>
void put(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view take(std::size_t bytes) {
    if (rest_.size() < bytes) {
      reject("schema is cut short");
    }
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }
  [[nodiscard]] bool empty() const noexcept { return rest_.empty(); }

 private:
  std::string_view rest_;
};

TensorSchema take_tensor(Reader& reader) {
  TensorSchema tensor;
  const auto dtype = dtype_from_wire(reader.take<std::uint8_t>());
  if (!dtype) {
    reject("schema names an unknown dtype");
  }
  tensor.dtype = *dtype;
  const auto flags = reader.take<std::uint8_t>();
  if (flags > 1) {
    reject("schema has unknown flags");
  }
  tensor.requires_grad = flags == 1;
  const auto dimensions = reader.take<std::uint16_t>();
  if (dimensions > kMaxDimensions) {
    reject(str("schema has a tensor of ", dimensions, " dimensions"));
  }
  // A later zero makes any product zero, so the running product must be checked without the zeros.
  std::uint64_t bytes = size_of(tensor.dtype);
  for (int i = 0; i < dimensions; ++i) {
    const auto length = reader.take<std::int64_t>();
    if (length < 0) {
      reject(str("schema has a tensor dimension of ", length));
    }
    const auto factor = static_cast<std::uint64_t>(length == 0 ? 1 : length);
    if (bytes > std::uint64_t{std::numeric_limits<std::int64_t>::max()} / factor) {
      reject("schema has a tensor larger than memory can be");
    }
    bytes *= factor;
    tensor.shape.push_back(length);
  }
  return tensor;
}

}  // namespace

std::size_t TensorSchema::count() const noexcept {
  std::size_t count = 1;
  for (std::int64_t length : shape) {
    count *= static_cast<std::size_t>(length);
  }
  return count;
}

Layout Schema::layout() const {
  std::vector<TensorSize> sizes;
  sizes.reserve(tensors.size());
  for (const TensorSchema& tensor : tensors) {
    sizes.push_back({tensor.count(), tensor.dtype});
  }
  return Layout(sizes);
}

std::uint64_t Schema::fingerprint() const { return Fingerprint().add(encode_schema(*this)).value(); }

std::string Schema::to_text() const {
  std::string text;
  for (const TensorSchema& tensor : tensors) {
    text += str(text.empty() ? "" : " ", hpcomm::to_string(tensor.dtype), "[");
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      text += str(i == 0 ? "" : ", ", tensor.shape[i]);
    }
    text += "]";
  }
  return text.empty() ? "no tensors" : text;
}

std::string encode_header(const MessageHeader& header) {
  WireHeader wire;
  wire.flags = header.carries_schema ? kCarriesSchema : 0;
  wire.edge = header.edge;
  wire.sequence = header.sequence;
  wire.schema = header.schema;
  wire.payload_bytes = header.payload_bytes;
  wire.microbatch = header.microbatch;
  wire.crc = crc32(&wire, offsetof(WireHeader, crc));
  return {reinterpret_cast<const char*>(&wire), sizeof wire};
}

MessageHeader parse_header(std::string_view bytes) {
  if (bytes.size() < kHeaderBytes) {
    reject(str("header has ", bytes.size(), " bytes instead of ", kHeaderBytes));
  }
  WireHeader wire;
  std::memcpy(&wire, bytes.data(), sizeof wire);
  if (wire.magic != kMagic || wire.crc != crc32(&wire, offsetof(WireHeader, crc))) {
    reject("header is damaged");
  }
  if (wire.version != kVersion || (wire.flags & ~kCarriesSchema) != 0) {
    reject(str("header of version ", wire.version, ", this rank speaks ", kVersion));
  }
  if (wire.reserved != decltype(wire.reserved){}) {
    reject("header uses bytes that this version does not know");
  }
  return {wire.edge,   wire.sequence,      wire.microbatch,
          wire.schema, wire.payload_bytes, (wire.flags & kCarriesSchema) != 0};
}

std::string encode_schema(const Schema& schema) {
  std::string bytes;
  put(bytes, static_cast<std::uint32_t>(schema.structure.size()));
  bytes += schema.structure;
  put(bytes, static_cast<std::uint32_t>(schema.tensors.size()));
  for (const TensorSchema& tensor : schema.tensors) {
    HPCOMM_REQUIRE(tensor.shape.size() <= kMaxDimensions, "a tensor of ", tensor.shape.size(), " dimensions");
    put(bytes, static_cast<std::uint8_t>(tensor.dtype));
    put(bytes, static_cast<std::uint8_t>(tensor.requires_grad ? 1 : 0));
    put(bytes, static_cast<std::uint16_t>(tensor.shape.size()));
    for (std::int64_t length : tensor.shape) {
      put(bytes, length);
    }
  }
  return bytes;
}

Schema parse_schema(std::string_view bytes) {
  Reader reader(bytes);
  Schema schema;
  schema.structure = reader.take(reader.take<std::uint32_t>());
  const auto tensors = reader.take<std::uint32_t>();
  std::uint64_t total = 0;
  for (std::uint32_t i = 0; i < tensors; ++i) {  // grows with the bytes that are there, not with the announced count
    schema.tensors.push_back(take_tensor(reader));
    const TensorSchema& tensor = schema.tensors.back();
    total += tensor.count() * size_of(tensor.dtype);
    if (total > std::uint64_t{std::numeric_limits<std::int64_t>::max()}) {
      reject("schema is larger than memory can be");
    }
  }
  if (!reader.empty()) {
    reject("schema has bytes behind its end");
  }
  return schema;
}

}  // namespace hpcomm
