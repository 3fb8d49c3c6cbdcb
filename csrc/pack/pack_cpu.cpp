// The pack kernel for CPUs: plain loops that the compiler vectorises, in three instruction sets chosen at run time.
#include <cstring>

#include "base/error.h"
#include "pack/bfloat16.h"
#include "pack/isa.h"
#include "pack/pack.h"

namespace hpcomm {

namespace {

template <typename T>
struct Element {
  using Wide = float;
  static float load(T value) noexcept { return static_cast<float>(value); }
  static T store(float value) noexcept { return static_cast<T>(value); }
};
template <>
struct Element<double> {
  using Wide = double;
  static double load(double value) noexcept { return value; }
  static double store(double value) noexcept { return value; }
};
template <>
struct Element<BFloat16> {
  using Wide = float;
  static float load(BFloat16 value) noexcept { return static_cast<float>(value); }
  static BFloat16 store(float value) noexcept { return BFloat16::from(value); }
};

template <typename From, typename To>
[[gnu::always_inline]] inline void convert(const CopyItem& item, double factor) {
  // Double only where one side is: float32 * float32 is what one process would compute.
  using Wide = decltype(typename Element<From>::Wide{} * typename Element<To>::Wide{});
  const auto* source = static_cast<const From*>(item.source);
  auto* target = static_cast<To*>(item.target);
  const auto wide_factor = static_cast<Wide>(factor);
  for (std::size_t i = 0; i < item.count; ++i) {
    target[i] = Element<To>::store(
        static_cast<typename Element<To>::Wide>(static_cast<Wide>(Element<From>::load(source[i])) * wide_factor));
  }
}

using Kernel = void (*)(const CopyItem&, double);

template <typename From, typename To>
void convert_base(const CopyItem& item, double factor) {
  convert<From, To>(item, factor);
}

#if defined(__x86_64__)
template <typename From, typename To>
__attribute__((target("avx2,fma,f16c"))) void convert_avx2(const CopyItem& item, double factor) {
  convert<From, To>(item, factor);
}
template <typename From, typename To>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"))) void convert_avx512(const CopyItem& item,
                                                                                           double factor) {
  convert<From, To>(item, factor);
}

template <typename From, typename To>
Kernel best() {
  static const Isa isa = detect_isa();
  switch (isa) {
    case Isa::kAvx512:
      return convert_avx512<From, To>;
    case Isa::kAvx2:
      return convert_avx2<From, To>;
    case Isa::kBase:
      return convert_base<From, To>;
  }
  return convert_base<From, To>;
}
#else
template <typename From, typename To>
Kernel best() {
  return convert_base<From, To>;
}
#endif

template <typename From>
Kernel kernel_to(DType to) {
  switch (to) {
    case DType::kFloat16:
      return best<From, _Float16>();
    case DType::kBFloat16:
      return best<From, BFloat16>();
    case DType::kFloat32:
      return best<From, float>();
    case DType::kFloat64:
      return best<From, double>();
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kComplex64:
    case DType::kComplex128:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
      return nullptr;
  }
  return nullptr;
}

Kernel find_kernel(DType from, DType to) {
  switch (from) {
    case DType::kFloat16:
      return kernel_to<_Float16>(to);
    case DType::kBFloat16:
      return kernel_to<BFloat16>(to);
    case DType::kFloat32:
      return kernel_to<float>(to);
    case DType::kFloat64:
      return kernel_to<double>(to);
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kComplex64:
    case DType::kComplex128:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
      return nullptr;
  }
  return nullptr;
}

}  // namespace

bool can_convert(DType from, DType to) noexcept { return from == to || find_kernel(from, to) != nullptr; }

bool can_scale(DType dtype) noexcept { return find_kernel(dtype, dtype) != nullptr; }

void run_copies_cpu(const std::vector<CopyItem>& items, const double* factor) {
  const double scale = factor == nullptr ? 1.0 : *factor;
  for (const CopyItem& item : items) {
    const std::size_t bytes = item.count * size_of(item.target_dtype);
    if (bytes == 0) {
      continue;  // memcpy must not see the null pointers of empty tensors
    }
    const bool arithmetic = item.source_dtype != item.target_dtype || (scale != 1.0 && is_floating(item.source_dtype));
    if (item.source == nullptr) {
      std::memset(item.target, 0, bytes);
    } else if (arithmetic) {
      const Kernel kernel = find_kernel(item.source_dtype, item.target_dtype);
      HPCOMM_ASSERT(kernel != nullptr, "scale of ", to_string(item.source_dtype));
      kernel(item, scale);
    } else if (item.source != item.target) {
      std::memcpy(item.target, item.source, bytes);
    }
  }
}

}  // namespace hpcomm
