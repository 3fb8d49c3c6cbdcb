// SHA-256 and HMAC-SHA256, for the proofs of a greeting. Written here so that the native half depends on nothing.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

namespace hpcomm::control {

using Digest = std::array<unsigned char, 32>;

// Source: NIST FIPS 180-4.
[[nodiscard]] Digest sha256(std::string_view message);
// Source: RFC 2104.
[[nodiscard]] Digest hmac_sha256(std::string_view key, std::string_view message);

// Takes equally long wherever the two differ: the time of a refusal must not tell how much of a guess was right.
[[nodiscard]] bool equal_in_constant_time(std::span<const unsigned char> a, std::span<const unsigned char> b);

// Unpredictable bytes from the kernel. Throws kTransport when it has none.
void fill_random(std::span<unsigned char> bytes);

}  // namespace hpcomm::control
