// Fingerprints of 64 bits, of plans and schemas (equality between ranks, not security).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace hpcomm {

// FNV-1a.
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

// Of what is looked at with every message: eight bytes at a time, where FNV-1a takes a nanosecond for each. Every step
// can be undone (a product with an odd number, an xor with the own upper half), so texts of one length that differ in a
// single word never meet. The shape is that of MurmurHash (A. Appleby, 2008).
[[nodiscard]] inline std::uint64_t fingerprint_by_words(std::string_view text) noexcept {
  std::uint64_t value = 0xcbf29ce484222325ULL;
  const auto add = [&value](std::uint64_t word) {
    value = (value ^ word) * 0x9e3779b97f4a7c15ULL;
    value ^= value >> 32U;
  };
  add(text.size());
  while (text.size() >= sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data(), sizeof word);
    add(word);
    text.remove_prefix(sizeof word);
  }
  std::uint64_t rest = 0;
  std::memcpy(&rest, text.data(), text.size());
  add(rest);
  return value;
}

}  // namespace hpcomm
