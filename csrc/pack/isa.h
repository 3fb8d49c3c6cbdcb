// Isa: which of the instruction sets that the kernels are compiled for this machine has.
#pragma once

#include <cstdint>

namespace hpcomm {

enum class Isa : std::uint8_t { kBase, kAvx2, kAvx512 };

// A kernel for kAvx2 may use avx2, fma and f16c, one for kAvx512 also avx512f, bw, vl and dq. Asks the CPU each time:
// callers keep the answer. Not an ifunc (target_clones): its resolver runs before a sanitizer's runtime is up.
[[nodiscard]] inline Isa detect_isa() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return wide ? Isa::kAvx512 : Isa::kAvx2;
  }
#endif
  return Isa::kBase;
}

}  // namespace hpcomm
