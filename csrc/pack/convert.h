// The loops of the CPU's pack kernel, found by the types of what they copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pack/fetching.h"
#include "pack/isa.h"
#include "pack/pack.h"

namespace hpcomm::convert {

inline constexpr std::size_t kAnySize = SIZE_MAX;

// Copies items, each element times the factor, up to the first that has `most` elements or more, no source, or other
// types or another reader than items[0]. Returns how many those were. A model has thousands of tensors that take
// nanoseconds each: hence one call for all of them, which also tells the caches of those to come. An item whose source
// is its target is converted in place; as bytes, it does nothing.
using Run = std::size_t (*)(const CopyItem* items, std::size_t count, std::size_t most, double factor,
                            Fetching fetching);
// Whether an element, times the factor, is infinite or no number.
using Check = bool (*)(const void* elements, std::size_t count, double factor);

// For fetching_of().
[[nodiscard]] bool runs_on_intel() noexcept;
// The kernels have the instruction set as an argument, at most detect_isa(): how tests reach those a machine would not
// take. Null where no kernel casts, or multiplies.
[[nodiscard]] Run find_run(Isa isa, DType from, DType to);
// Between equal types, without a factor.
[[nodiscard]] Run bytes_run(Isa isa);
// Null where there is nothing to check. As wide as the loops multiply: what is finite in double may be too large for
// float32.
[[nodiscard]] Check find_check(Isa isa, DType from, DType to);

// run_copies_cpu() in `isa`.
void run_copies(Isa isa, const std::vector<CopyItem>& items, const double* factor, std::int32_t* first_bad);

}  // namespace hpcomm::convert
