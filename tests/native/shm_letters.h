// What tests of messages over shared memory send: numbers that say who wrote them, and under which tag.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "native/check.h"

namespace hpcomm::testing {

inline std::vector<std::int64_t> letter(int from, std::uint64_t tag, std::size_t count) {
  std::vector<std::int64_t> values(count);
  std::iota(values.begin(), values.end(), static_cast<std::int64_t>(from) * 1000000 + static_cast<std::int64_t>(tag));
  return values;
}

inline void check_letter(const std::vector<std::int64_t>& got, int from, std::uint64_t tag) {
  CHECK(got == letter(from, tag, got.size()));
}

}  // namespace hpcomm::testing
