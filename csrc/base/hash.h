// FNV-1a, 64 bits: fingerprints of plans and schemas (equality between ranks, not security).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hpcomm {

class Fingerprint {
 public:
  // Source: G. Fowler, L. C. Noll, K.-P. Vo, "FNV hash history"; constants of the 64-bit variant.
  Fingerprint& add(const void* data, std::size_t bytes) noexcept {
    const auto* p = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) {
      value_ = (value_ ^ p[i]) * 0x100000001b3ULL;
    }
    return *this;
  }
  // The length goes in first, so that ("ab","c") and ("a","bc") differ.
  Fingerprint& add(std::string_view text) noexcept { return add_int(text.size()).add(text.data(), text.size()); }
  Fingerprint& add_int(std::uint64_t number) noexcept { return add(&number, sizeof number); }

  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

}  // namespace hpcomm
