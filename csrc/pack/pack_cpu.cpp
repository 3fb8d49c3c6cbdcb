// The pack kernel for CPUs: plain loops that the compiler vectorises, in three instruction sets chosen at run time.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "pack/element.h"
#include "pack/isa.h"
#include "pack/pack.h"
#include "pack/reduce_kernels.h"

namespace hpcomm {

namespace {

Isa isa_of_this_cpu() {
  static const Isa isa = detect_isa();
  return isa;
}

template <typename From, typename To>
[[gnu::always_inline]] inline void convert(const CopyItem& item, double factor) {
  using Wide = element::Wide<From, To>;
  const auto* source = static_cast<const From*>(item.source);
  auto* target = static_cast<To*>(item.target);
  const auto wide_factor = static_cast<Wide>(factor);
  for (std::size_t i = 0; i < item.count; ++i) {
    target[i] = element::narrow<To>(element::widen(source[i], wide_factor));
  }
}

// Whether one of them, times the factor, is infinite or no number.
template <typename From, typename Wide>
[[gnu::always_inline]] inline bool is_bad(const void* elements, std::size_t count, double factor) {
  const auto* source = static_cast<const From*>(elements);
  const auto wide_factor = static_cast<Wide>(factor);
  std::uint32_t bad = 0;
  for (std::size_t i = 0; i < count; ++i) {
    bad |= static_cast<std::uint32_t>(!element::is_finite(element::widen(source[i], wide_factor)));
  }
  return bad != 0;
}

using Kernel = void (*)(const CopyItem&, double);
using Check = bool (*)(const void*, std::size_t, double);

template <typename From, typename To>
void convert_base(const CopyItem& item, double factor) {
  convert<From, To>(item, factor);
}

template <typename From, typename Wide>
bool is_bad_base(const void* elements, std::size_t count, double factor) {
  return is_bad<From, Wide>(elements, count, factor);
}

#if defined(__x86_64__)
#define HPCOMM_AVX2 __attribute__((target("avx2,fma,f16c")))
#define HPCOMM_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))

template <typename From, typename To>
HPCOMM_AVX2 void convert_avx2(const CopyItem& item, double factor) {
  convert<From, To>(item, factor);
}
template <typename From, typename To>
HPCOMM_AVX512 void convert_avx512(const CopyItem& item, double factor) {
  convert<From, To>(item, factor);
}
template <typename From, typename Wide>
HPCOMM_AVX2 bool is_bad_avx2(const void* elements, std::size_t count, double factor) {
  return is_bad<From, Wide>(elements, count, factor);
}
template <typename From, typename Wide>
HPCOMM_AVX512 bool is_bad_avx512(const void* elements, std::size_t count, double factor) {
  return is_bad<From, Wide>(elements, count, factor);
}

// The one of three that this machine runs best.
template <typename Function>
Function best(Function base, Function avx2, Function avx512) {
  switch (isa_of_this_cpu()) {
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    case Isa::kBase:
      return base;
  }
  return base;
}

template <typename From, typename To>
Kernel best_kernel() {
  return best<Kernel>(convert_base<From, To>, convert_avx2<From, To>, convert_avx512<From, To>);
}

template <typename From, typename Wide>
Check best_check() {
  return best<Check>(is_bad_base<From, Wide>, is_bad_avx2<From, Wide>, is_bad_avx512<From, Wide>);
}
#else
template <typename From, typename To>
Kernel best_kernel() {
  return convert_base<From, To>;
}

template <typename From, typename Wide>
Check best_check() {
  return is_bad_base<From, Wide>;
}
#endif

template <typename From>
Kernel kernel_to(DType to) {
  switch (to) {
    case DType::kFloat16:
      return best_kernel<From, Float16>();
    case DType::kBFloat16:
      return best_kernel<From, BFloat16>();
    case DType::kFloat32:
      return best_kernel<From, float>();
    case DType::kFloat64:
      return best_kernel<From, double>();
    case DType::kFloat8E4M3FN:
      return best_kernel<From, Float8E4M3FN>();
    case DType::kFloat8E5M2:
      return best_kernel<From, Float8E5M2>();
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kComplex64:
    case DType::kComplex128:
      return nullptr;
  }
  return nullptr;
}

Kernel find_kernel(DType from, DType to) {
  switch (from) {
    case DType::kFloat16:
      return kernel_to<Float16>(to);
    case DType::kBFloat16:
      return kernel_to<BFloat16>(to);
    case DType::kFloat32:
      return kernel_to<float>(to);
    case DType::kFloat64:
      return kernel_to<double>(to);
    case DType::kFloat8E4M3FN:
      return kernel_to<Float8E4M3FN>(to);
    case DType::kFloat8E5M2:
      return kernel_to<Float8E5M2>(to);
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kComplex64:
    case DType::kComplex128:
      return nullptr;
  }
  return nullptr;
}

template <typename From>
Check check_in(DType to) {
  return to == DType::kFloat64 ? best_check<From, double>() : best_check<From, element::Wide<From, float>>();
}

// Null where there is nothing to check. As wide as the kernel multiplies: what is finite in double may be too large for
// float32.
Check find_check(DType from, DType to) {
  switch (from) {
    case DType::kFloat16:
      return check_in<Float16>(to);
    case DType::kBFloat16:
      return check_in<BFloat16>(to);
    case DType::kFloat32:
      return check_in<float>(to);
    case DType::kFloat64:
      return check_in<double>(to);
    case DType::kFloat8E4M3FN:
      return check_in<Float8E4M3FN>(to);
    case DType::kFloat8E5M2:
      return check_in<Float8E5M2>(to);
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kComplex64:
    case DType::kComplex128:
      return nullptr;
  }
  return nullptr;
}

// What other cores read goes past the caches of this one from here on. It saves the fetch of each line that is about to
// be overwritten, and the detour of each line through the cache of the core that wrote it: measured with two ranks that
// pack and then reduce, half the time from 1 MB to 24 MB in total.
constexpr std::size_t kStream = std::size_t{16} << 10;

// Converted within the first-level cache, then copied past it.
void stream_converted(Kernel kernel, const CopyItem& item, double scale) {
  alignas(64) std::array<unsigned char, 4096> block;
  const std::size_t source_size = size_of(item.source_dtype);
  const std::size_t target_size = size_of(item.target_dtype);
  const std::size_t per_block = block.size() / target_size;
  CopyItem piece = item;
  piece.target = block.data();
  for (std::size_t done = 0; done < item.count; done += per_block) {
    piece.source = static_cast<const char*>(item.source) + done * source_size;
    piece.count = std::min(per_block, item.count - done);
    kernel(piece, scale);
    kernels::stream_copy(isa_of_this_cpu(), static_cast<char*>(item.target) + done * target_size, block.data(),
                         piece.count * target_size);
  }
}

bool goes_past_caches(const CopyItem& item) {
  return item.reader == Reader::kOthers && item.source != item.target &&
         item.count * size_of(item.target_dtype) >= kStream;
}

// `streams`: past the caches, and kernels::stream_fence() has to follow.
void run_copy(const CopyItem& item, double scale, bool streams) {
  const std::size_t bytes = item.count * size_of(item.target_dtype);
  if (bytes == 0) {
    return;  // memcpy must not see the null pointers of empty tensors
  }
  const bool arithmetic = item.source_dtype != item.target_dtype || (scale != 1.0 && is_floating(item.source_dtype));
  if (item.source == nullptr) {
    std::memset(item.target, 0, bytes);
  } else if (arithmetic) {
    const Kernel kernel = find_kernel(item.source_dtype, item.target_dtype);
    HPCOMM_ASSERT(kernel != nullptr, "scale of ", to_string(item.source_dtype));
    if (streams) {
      stream_converted(kernel, item, scale);
    } else {
      kernel(item, scale);
    }
  } else if (streams) {
    kernels::stream_copy(isa_of_this_cpu(), item.target, item.source, bytes);
  } else if (item.source != item.target) {
    std::memcpy(item.target, item.source, bytes);
  }
}

// run_copy(), and whether the source had a bad value. Two passes over a piece that stays in the first-level cache: the
// kernels without a check stay as they are, and there is one checking loop for each source instead of one for each
// pair.
bool run_checked_copy(const CopyItem& item, double scale, Check check) {
  constexpr std::size_t kPiece = 2048;  // elements
  const bool streams = goes_past_caches(item);
  const std::size_t source_size = size_of(item.source_dtype);
  const std::size_t target_size = size_of(item.target_dtype);
  bool bad = false;
  for (std::size_t done = 0; done < item.count; done += kPiece) {
    CopyItem piece = item;
    piece.source = static_cast<const char*>(item.source) + done * source_size;
    piece.target = static_cast<char*>(item.target) + done * target_size;
    piece.count = std::min(kPiece, item.count - done);
    bad = check(piece.source, piece.count, scale) || bad;  // first: scaling may be in place
    run_copy(piece, scale, streams);
  }
  return bad;
}

}  // namespace

bool can_convert(DType from, DType to) noexcept { return from == to || find_kernel(from, to) != nullptr; }

bool can_scale(DType dtype) noexcept { return find_kernel(dtype, dtype) != nullptr; }

void run_copies_cpu(const std::vector<CopyItem>& items, const double* factor, std::int32_t* first_bad) {
  const double scale = factor == nullptr ? 1.0 : *factor;
  // Later tensors than the first bad one do not matter.
  const std::size_t unchecked = first_bad == nullptr ? 0 : static_cast<std::size_t>(std::max(*first_bad, 0));
  bool found = false;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const CopyItem& item = items[i];
    const bool checked = i < unchecked && !found && item.source != nullptr;
    const Check check = checked ? find_check(item.source_dtype, item.target_dtype) : nullptr;
    if (check == nullptr) {
      run_copy(item, scale, goes_past_caches(item));
    } else if (run_checked_copy(item, scale, check)) {
      *first_bad = static_cast<std::int32_t>(i);
      found = true;
    }
  }
  kernels::stream_fence();
}

}  // namespace hpcomm
