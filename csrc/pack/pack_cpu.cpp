// The pack kernel for CPUs: plain loops that the compiler vectorises, in three instruction sets chosen at run time.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

// float32 to bfloat16 by the instruction made for it, which takes denormals for zero: a turn that has one goes the
// long way. Bit for bit like the loop, at twice its rate; that loop is the one that computes more than memory waits.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c"))) void narrow_avx512(
    const CopyItem& item, double factor) {
  constexpr int kDenormal = 0x20;  // of vfpclassps
  constexpr std::size_t kTurn = 32;
  const auto* source = static_cast<const float*>(item.source);
  auto* target = static_cast<BFloat16*>(item.target);
  const __m512 wide_factor = _mm512_set1_ps(static_cast<float>(factor));
  std::size_t i = 0;
  for (; i + kTurn <= item.count; i += kTurn) {
    const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(source + i), wide_factor);
    const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(source + i + 16), wide_factor);
    if ((_mm512_fpclass_ps_mask(low, kDenormal) | _mm512_fpclass_ps_mask(high, kDenormal)) != 0) [[unlikely]] {
      convert_avx512<float, BFloat16>({source + i, target + i, kTurn, DType::kFloat32, DType::kBFloat16}, factor);
    } else {
      const __m512bh narrow = _mm512_cvtne2ps_pbh(high, low);
      std::memcpy(target + i, &narrow, sizeof narrow);
    }
  }
  convert_avx512<float, BFloat16>({source + i, target + i, item.count - i, DType::kFloat32, DType::kBFloat16}, factor);
}

template <typename From, typename To>
Kernel best_kernel() {
  if constexpr (std::is_same_v<From, float> && std::is_same_v<To, BFloat16>) {
    static const bool has_instruction = __builtin_cpu_supports("avx512bf16") != 0;
    if (isa_of_this_cpu() == Isa::kAvx512 && has_instruction) {
      return narrow_avx512;
    }
  }
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
// be overwritten, and the detour of each line through the cache of the core that wrote it. Kept by trial,
// with two ranks that pack and then reduce 1 to 64 MB.
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

// What is done to items of one pair of types; looked up when the types change, not for each of a thousand tensors.
class Way {
 public:
  explicit Way(double scale) : scale_(scale) {}

  // Stores past the caches need kernels::stream_fence() at the end.
  void copy(const CopyItem& item) {
    set(item);
    copy_part(item, goes_past_caches(item));
  }

  // copy(), and whether the source had a bad value. Two passes over a piece that stays in the first-level cache: the
  // kernels without a check stay as they are, and there is one checking loop for each source instead of one for each
  // pair.
  bool checked_copy(const CopyItem& item) {
    constexpr std::size_t kPiece = 2048;  // elements
    const Check check = item.source == nullptr ? nullptr : find_check(item.source_dtype, item.target_dtype);
    if (check == nullptr) {
      copy(item);
      return false;
    }
    set(item);
    const bool streams = goes_past_caches(item);
    bool bad = false;
    for (std::size_t done = 0; done < item.count; done += kPiece) {
      CopyItem piece = item;
      piece.source = static_cast<const char*>(item.source) + done * source_size_;
      piece.target = static_cast<char*>(item.target) + done * target_size_;
      piece.count = std::min(kPiece, item.count - done);
      bad = check(piece.source, piece.count, scale_) || bad;  // first: scaling may be in place
      copy_part(piece, streams);
    }
    return bad;
  }

 private:
  void set(const CopyItem& item) {
    if (is_set_ && item.source_dtype == source_dtype_ && item.target_dtype == target_dtype_) {
      return;
    }
    is_set_ = true;
    source_dtype_ = item.source_dtype;
    target_dtype_ = item.target_dtype;
    source_size_ = size_of(source_dtype_);
    target_size_ = size_of(target_dtype_);
    kernel_ = nullptr;
    if (source_dtype_ != target_dtype_ || (scale_ != 1.0 && is_floating(source_dtype_))) {
      kernel_ = find_kernel(source_dtype_, target_dtype_);
      HPCOMM_ASSERT(kernel_ != nullptr, "scale of ", to_string(source_dtype_));
    }
  }

  [[nodiscard]] bool goes_past_caches(const CopyItem& item) const {
    return item.reader == Reader::kOthers && item.source != item.target && item.count * target_size_ >= kStream;
  }

  void copy_part(const CopyItem& item, bool streams) const {
    const std::size_t bytes = item.count * target_size_;
    if (bytes == 0) {
      return;  // memcpy must not see the null pointers of empty tensors
    }
    if (item.source == nullptr) {
      std::memset(item.target, 0, bytes);
    } else if (kernel_ != nullptr) {
      if (streams) {
        stream_converted(kernel_, item, scale_);
      } else {
        kernel_(item, scale_);
      }
    } else if (streams) {
      kernels::stream_copy(isa_of_this_cpu(), item.target, item.source, bytes);
    } else if (item.source != item.target) {
      std::memcpy(item.target, item.source, bytes);
    }
  }

  const double scale_;
  bool is_set_ = false;
  DType source_dtype_{};
  DType target_dtype_{};
  std::size_t source_size_ = 0;
  std::size_t target_size_ = 0;
  Kernel kernel_ = nullptr;  // null where bytes stay as they are
};

}  // namespace

bool can_convert(DType from, DType to) noexcept { return from == to || find_kernel(from, to) != nullptr; }

bool can_scale(DType dtype) noexcept { return find_kernel(dtype, dtype) != nullptr; }

void run_copies_cpu(const std::vector<CopyItem>& items, const double* factor, std::int32_t* first_bad) {
  const double scale = factor == nullptr ? 1.0 : *factor;
  Way way(scale);
  // Later tensors than the first bad one do not matter.
  const std::size_t unchecked = first_bad == nullptr ? 0 : static_cast<std::size_t>(std::max(*first_bad, 0));
  std::size_t next = 0;
  for (; next < std::min(unchecked, items.size()); ++next) {
    if (way.checked_copy(items[next])) {
      *first_bad = static_cast<std::int32_t>(next++);
      break;
    }
  }
  for (; next < items.size(); ++next) {
    way.copy(items[next]);
  }
  kernels::stream_fence();
}

}  // namespace hpcomm
