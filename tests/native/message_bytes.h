// For tests of message parsers: bytes that were damaged, or made on purpose.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "engine/message.h"

namespace hpcomm::testing {

// CRC-32C once more, by its definition: whoever damages a header on purpose also repairs its checksum.
inline std::string with_crc(std::string header) {
  std::uint32_t crc = ~0U;
  for (std::size_t i = 0; i + 4 < kHeaderBytes; ++i) {
    crc ^= static_cast<unsigned char>(header[i]);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc & 1U) != 0 ? (crc >> 1) ^ 0x82f63b78U : crc >> 1;
    }
  }
  crc = ~crc;
  std::memcpy(header.data() + kHeaderBytes - 4, &crc, sizeof crc);
  return header;
}

// In memory of exactly its length, so that a read behind the end is seen by the address sanitizer.
inline std::vector<char> exact(const std::string& bytes) { return {bytes.begin(), bytes.end()}; }

// Flipped, overwritten, cut, extended; lengths near the edges that a parser can get wrong.
inline void damage(std::mt19937_64& random, std::string& bytes) {
  for (std::uint64_t times = 1 + random() % 3; times > 0 && !bytes.empty(); --times) {
    switch (random() % 5) {
      case 0:
        bytes[random() % bytes.size()] ^= static_cast<char>(1U << random() % 8);
        break;
      case 1:
        bytes[random() % bytes.size()] = static_cast<char>(random());
        break;
      case 2:
        bytes.resize(random() % (bytes.size() + 1));
        break;
      case 3:
        bytes.insert(random() % (bytes.size() + 1), std::string(1 + random() % 9, static_cast<char>(random())));
        break;
      case 4: {
        constexpr std::uint32_t kEdges[] = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff, 64, 65, 200, 201};
        const std::uint32_t length = kEdges[random() % std::size(kEdges)];
        if (bytes.size() >= sizeof length) {
          std::memcpy(bytes.data() + random() % (bytes.size() - sizeof length + 1), &length, sizeof length);
        }
        break;
      }
    }
  }
}

// An order of the tensor's dimensions other than the usual one, or none where it has only that.
inline void put_some_order(std::mt19937_64& random, TensorSchema& tensor) {
  tensor.order.resize(tensor.shape.size());
  std::iota(tensor.order.begin(), tensor.order.end(), std::uint8_t{0});
  std::shuffle(tensor.order.begin(), tensor.order.end(), random);
  if (std::is_sorted(tensor.order.begin(), tensor.order.end())) {
    tensor.order.clear();
  }
}

}  // namespace hpcomm::testing
