// pack/reduce.h: every dtype and operation against one element at a time, in every instruction set of this machine.
#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "native/check.h"
#include "pack/reduce.h"
#include "pack/reduce_kernels.h"

using namespace hpcomm;

namespace {

using Bytes = std::vector<unsigned char>;

constexpr std::array<ReduceOp, 8> kOps{ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kProduct, ReduceOp::kMin,
                                       ReduceOp::kMax, ReduceOp::kBitAnd,  ReduceOp::kBitOr,   ReduceOp::kBitXor};
constexpr std::array<DType, 18> kDTypes{
    DType::kBool,      DType::kUInt8,      DType::kInt8,         DType::kInt16,      DType::kInt32,
    DType::kInt64,     DType::kFloat16,    DType::kBFloat16,     DType::kFloat32,    DType::kFloat64,
    DType::kComplex64, DType::kComplex128, DType::kFloat8E4M3FN, DType::kFloat8E5M2, DType::kUInt16,
    DType::kUInt64,    DType::kComplex32,  DType::kFloat8E8M0FNU};

std::vector<Isa> isas() {
  std::vector<Isa> all;
  for (const Isa isa : {Isa::kBase, Isa::kAvx2, Isa::kAvx512}) {
    if (isa <= detect_isa()) {
      all.push_back(isa);
    }
  }
  return all;
}

bool is_complex(DType dtype) { return dtype == DType::kComplex64 || dtype == DType::kComplex128; }
bool is_float8(DType dtype) { return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2; }
bool is_bitwise(ReduceOp op) { return op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor; }

// --- The reference
// ----------------------------------------------------------------------------------------------------

template <typename T>
T get(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
void put(unsigned char* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// A 16-bit float with `fraction` explicit bits, and the exponent of its smallest normal number.
struct Half {
  int fraction;
  int smallest;
};
constexpr Half kHalf{10, -14};
constexpr Half kBrain{7, -126};

double decode(Half type, std::uint16_t bits) {
  const int biased = (bits & 0x7fff) >> type.fraction;
  const int fraction = bits & ((1 << type.fraction) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (biased == (0x7fff >> type.fraction)) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  const double magnitude = biased == 0 ? fraction : fraction + (1 << type.fraction);
  return sign * std::ldexp(magnitude, type.smallest - type.fraction + std::max(biased, 1) - 1);
}

// To the nearest of all that there is, ties to even: a double holds the candidates and the value exactly.
std::uint16_t encode(Half type, double value) {
  const auto infinity = static_cast<std::uint16_t>(0x7fff >> type.fraction << type.fraction);
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) {
    return infinity | 1;
  }
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) {
    return sign | infinity;
  }
  const int exponent = magnitude == 0 ? type.smallest : std::max(std::ilogb(magnitude), type.smallest);
  // The unit of the last place, counted from zero: bit patterns of floats are consecutive.
  const auto units = static_cast<std::int64_t>(std::nearbyint(std::ldexp(magnitude, type.fraction - exponent)));
  const std::int64_t bits = units + (static_cast<std::int64_t>(exponent - type.smallest) << type.fraction);
  return sign | static_cast<std::uint16_t>(std::min<std::int64_t>(bits, infinity));
}

template <typename T>
T fold(ReduceOp op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    // Products of 64 bits, cut to the type's: what wraps around is the same.
    const auto wide_a = static_cast<std::uint64_t>(a);
    const auto wide_b = static_cast<std::uint64_t>(b);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
        return static_cast<T>(wide_a + wide_b);
      case ReduceOp::kProduct:
        return static_cast<T>(wide_a * wide_b);
      case ReduceOp::kMin:
        return std::min(a, b);
      case ReduceOp::kMax:
        return std::max(a, b);
      case ReduceOp::kBitAnd:
        return static_cast<T>(wide_a & wide_b);
      case ReduceOp::kBitOr:
        return static_cast<T>(wide_a | wide_b);
      case ReduceOp::kBitXor:
        return static_cast<T>(wide_a ^ wide_b);
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
        return a + b;
      case ReduceOp::kProduct:
        return a * b;
      case ReduceOp::kMin:
        return std::isnan(a) ? a : (std::isnan(b) || b < a ? b : a);
      case ReduceOp::kMax:
        return std::isnan(a) ? a : (std::isnan(b) || b > a ? b : a);
      case ReduceOp::kBitAnd:
      case ReduceOp::kBitOr:
      case ReduceOp::kBitXor:
        break;
    }
  } else if (op == ReduceOp::kProduct) {
    // volatile: whatever flags this file gets, the four products are rounded.
    const volatile auto ac = a.real() * b.real();
    const volatile auto bd = a.imag() * b.imag();
    const volatile auto ad = a.real() * b.imag();
    const volatile auto bc = a.imag() * b.real();
    return {ac - bd, ad + bc};
  } else {
    return {a.real() + b.real(), a.imag() + b.imag()};
  }
  return a;
}

template <typename T>
void fold_all(ReduceOp op, const std::vector<const unsigned char*>& sources, unsigned char* to) {
  T total = get<T>(sources[0]);
  for (std::size_t s = 1; s < sources.size(); ++s) {
    total = fold(op, total, get<T>(sources[s]));
  }
  if (op == ReduceOp::kAverage) {
    if constexpr (std::is_signed_v<T> && std::is_integral_v<T>) {
      total = static_cast<T>(std::int64_t{total} / static_cast<std::int64_t>(sources.size()));
    } else if constexpr (std::is_integral_v<T>) {
      total = static_cast<T>(total / sources.size());
    } else {
      using Real = decltype(std::real(T{}));
      total /= static_cast<Real>(sources.size());
    }
  }
  put(to, total);
}

void fold_half(Half type, ReduceOp op, const std::vector<const unsigned char*>& sources, unsigned char* to) {
  auto total = static_cast<float>(decode(type, get<std::uint16_t>(sources[0])));
  for (std::size_t s = 1; s < sources.size(); ++s) {
    total = fold(op, total, static_cast<float>(decode(type, get<std::uint16_t>(sources[s]))));
  }
  if (op == ReduceOp::kAverage) {
    total /= static_cast<float>(sources.size());
  }
  put(to, encode(type, total));
}

void fold_bool(ReduceOp op, const std::vector<const unsigned char*>& sources, unsigned char* to) {
  const auto trues = std::count_if(sources.begin(), sources.end(), [](const unsigned char* s) { return *s != 0; });
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr:
      *to = trues > 0;
      break;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd:
      *to = trues == static_cast<std::ptrdiff_t>(sources.size());
      break;
    case ReduceOp::kBitXor:
      *to = trues % 2 != 0;
      break;
    case ReduceOp::kAverage:
      break;
  }
}

void fold_element(DType dtype, ReduceOp op, const std::vector<const unsigned char*>& sources, unsigned char* to) {
  switch (dtype) {
    case DType::kBool:
      return fold_bool(op, sources, to);
    case DType::kUInt8:
      return fold_all<std::uint8_t>(op, sources, to);
    case DType::kInt8:
      return fold_all<std::int8_t>(op, sources, to);
    case DType::kInt16:
      return fold_all<std::int16_t>(op, sources, to);
    case DType::kInt32:
      return fold_all<std::int32_t>(op, sources, to);
    case DType::kInt64:
      return fold_all<std::int64_t>(op, sources, to);
    case DType::kFloat16:
      return fold_half(kHalf, op, sources, to);
    case DType::kBFloat16:
      return fold_half(kBrain, op, sources, to);
    case DType::kFloat32:
      return fold_all<float>(op, sources, to);
    case DType::kFloat64:
      return fold_all<double>(op, sources, to);
    case DType::kComplex64:
      return fold_all<std::complex<float>>(op, sources, to);
    case DType::kComplex128:
      return fold_all<std::complex<double>>(op, sources, to);
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex32:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
      return;
  }
}

// Equal bits, but one NaN is like another.
bool same(DType dtype, const unsigned char* a, const unsigned char* b) {
  const auto parts_alike = [&](auto zero, std::size_t parts) {
    using T = decltype(zero);
    for (std::size_t p = 0; p < parts; ++p) {
      const unsigned char* left = a + p * sizeof(T);
      const unsigned char* right = b + p * sizeof(T);
      if (std::memcmp(left, right, sizeof(T)) != 0 && !(std::isnan(get<T>(left)) && std::isnan(get<T>(right)))) {
        return false;
      }
    }
    return true;
  };
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16: {
      const Half type = dtype == DType::kFloat16 ? kHalf : kBrain;
      return std::memcmp(a, b, 2) == 0 ||
             (std::isnan(decode(type, get<std::uint16_t>(a))) && std::isnan(decode(type, get<std::uint16_t>(b))));
    }
    case DType::kFloat32:
      return parts_alike(0.0F, 1);
    case DType::kComplex64:
      return parts_alike(0.0F, 2);
    case DType::kFloat64:
      return parts_alike(0.0, 1);
    case DType::kComplex128:
      return parts_alike(0.0, 2);
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex32:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
      return std::memcmp(a, b, size_of(dtype)) == 0;
  }
  return false;
}

// --- Inputs
// -----------------------------------------------------------------------------------------------------------

// Mostly numbers around 1, whose products stay finite; one in ten is what makes comparisons and rounding hard.
double number(std::mt19937& random) {
  constexpr std::array<double, 10> kHard{std::numeric_limits<double>::quiet_NaN(),
                                         std::numeric_limits<double>::infinity(),
                                         -std::numeric_limits<double>::infinity(),
                                         0.0,
                                         -0.0,
                                         6e-8,
                                         65504,
                                         3.3e38,
                                         1e-40,
                                         -1.0009765625};
  if (random() % 10 == 0) {
    return kHard[random() % kHard.size()];
  }
  return std::uniform_real_distribution<double>(-2, 2)(random);
}

void fill(DType dtype, Bytes& bytes, std::mt19937& random) {
  const std::size_t step = is_complex(dtype) ? size_of(dtype) / 2 : size_of(dtype);
  for (std::size_t at = 0; at + step <= bytes.size(); at += step) {
    switch (dtype) {
      case DType::kBool:
        bytes[at] = random() % 2;
        break;
      case DType::kFloat16:
        put(&bytes[at], encode(kHalf, number(random)));
        break;
      case DType::kBFloat16:
        put(&bytes[at], encode(kBrain, number(random)));
        break;
      case DType::kFloat32:
      case DType::kComplex64:
        put(&bytes[at], static_cast<float>(number(random)));
        break;
      case DType::kFloat64:
      case DType::kComplex128:
        put(&bytes[at], number(random));
        break;
      case DType::kUInt8:
      case DType::kInt8:
      case DType::kInt16:
      case DType::kInt32:
      case DType::kInt64:
      case DType::kFloat8E4M3FN:
      case DType::kFloat8E5M2:
      case DType::kUInt16:
      case DType::kUInt32:
      case DType::kUInt64:
      case DType::kComplex32:
      case DType::kFloat8E4M3FNUZ:
      case DType::kFloat8E5M2FNUZ:
      case DType::kFloat8E8M0FNU:
        for (std::size_t b = 0; b < step; ++b) {
          bytes[at + b] = static_cast<unsigned char>(random());
        }
        break;
    }
  }
}

constexpr std::size_t kMargin = 4;  // elements around each array, which nobody may write

// `sources` arrays of `count` elements, each at another distance from an aligned address, and what they reduce to.
struct Case {
  DType dtype;
  ReduceOp op;
  std::size_t count;
  std::size_t bytes;  // of an element
  std::vector<Bytes> arrays;
  std::vector<const void*> sources;
  Bytes expected;

  Case(DType a_dtype, ReduceOp a_op, std::size_t source_count, std::size_t a_count, std::mt19937& random)
      : dtype(a_dtype), op(a_op), count(a_count), bytes(size_of(a_dtype)), expected(a_count * bytes) {
    for (std::size_t s = 0; s < source_count; ++s) {
      arrays.emplace_back((count + 2 * kMargin) * bytes);
      fill(dtype, arrays.back(), random);
    }
    for (std::size_t s = 0; s < source_count; ++s) {
      sources.push_back(arrays[s].data() + s % kMargin * bytes);
    }
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<const unsigned char*> elements;
      for (const void* source : sources) {
        elements.push_back(static_cast<const unsigned char*>(source) + i * bytes);
      }
      fold_element(dtype, op, elements, expected.data() + i * bytes);
    }
  }

  [[nodiscard]] std::string name(Isa isa) const {
    return str(to_string(op), " of ", sources.size(), " x ", count, " ", to_string(dtype), ", isa ",
               static_cast<int>(isa));
  }

  void expect(const void* result, const std::string& what) const {
    const auto* got = static_cast<const unsigned char*>(result);
    for (std::size_t i = 0; i < count; ++i) {
      if (!same(dtype, got + i * bytes, expected.data() + i * bytes)) {
        check::fail(__FILE__, __LINE__, str(what, ": element ", i, " differs"));
        return;
      }
    }
  }
};

// Every dtype x operation that exists.
template <typename Body>
void for_all(const Body& body) {
  for (const DType dtype : kDTypes) {
    for (const ReduceOp op : kOps) {
      if (can_reduce(dtype, op)) {
        body(dtype, op);
      }
    }
  }
}

}  // namespace

TEST(reduce_knows_what_it_can) {
  for (const DType dtype : kDTypes) {
    for (const ReduceOp op : kOps) {
      const bool floating = is_floating(dtype);
      bool expected = !is_float8(dtype) && !is_only_moved(dtype);
      expected = expected && !(is_bitwise(op) && (floating || is_complex(dtype)));
      expected = expected && !(is_complex(dtype) && (op == ReduceOp::kMin || op == ReduceOp::kMax));
      expected = expected && !(op == ReduceOp::kAverage && dtype == DType::kBool);
      if (can_reduce(dtype, op) != expected) {
        check::fail(__FILE__, __LINE__, str("can_reduce(", to_string(dtype), ", ", to_string(op), ")"));
      }
      if (!expected) {
        std::array<double, 2> value{};
        const std::array<const void*, 1> sources{value.data()};
        CHECK_THROWS(ErrorKind::kInvalidArgument, reduce_cpu(value.data(), sources, 1, dtype, op), to_string(dtype));
      }
    }
  }
  float value = 0;
  CHECK_THROWS(ErrorKind::kInvalidArgument, reduce_cpu(&value, {}, 1, DType::kFloat32, ReduceOp::kSum), "no sources");
}

TEST(reduce_equals_one_element_at_a_time) {
  std::mt19937 random(1);
  for_all([&](DType dtype, ReduceOp op) {
    for (std::size_t source_count = 1; source_count <= 17; ++source_count) {
      for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{37}, std::size_t{64}}) {
        const Case one(dtype, op, source_count, count, random);
        for (const Isa isa : isas()) {
          for (std::size_t shift = 0; shift < 2; ++shift) {
            Bytes target((count + 2 * kMargin) * one.bytes, 0xa5);
            const std::size_t at = (kMargin + shift) * one.bytes;
            kernels::reduce(isa, target.data() + at, one.sources, count, dtype, op);
            one.expect(target.data() + at, one.name(isa));
            const auto written = [](unsigned char byte) { return byte != 0xa5; };
            CHECK(std::none_of(target.begin(), target.begin() + static_cast<std::ptrdiff_t>(at), written));
            CHECK(std::none_of(target.begin() + static_cast<std::ptrdiff_t>(at + count * one.bytes), target.end(),
                               written));
          }
        }
      }
    }
  });
}

TEST(reduce_of_long_arrays) {
  // Longer than a block of the accumulator, and no multiple of one.
  std::mt19937 random(2);
  for_all([&](DType dtype, ReduceOp op) {
    for (const std::size_t source_count : {2, 3, 4, 5, 6, 7, 8, 16}) {
      const Case one(dtype, op, source_count, 9001 / size_of(dtype), random);
      for (const Isa isa : isas()) {
        Bytes target(one.expected.size());
        kernels::reduce(isa, target.data(), one.sources, one.count, dtype, op);
        one.expect(target.data(), one.name(isa));
      }
    }
  });
}

TEST(reduce_into_one_of_its_sources) {
  std::mt19937 random(3);
  for_all([&](DType dtype, ReduceOp op) {
    for (const std::size_t source_count : {1, 2, 3, 4, 5, 8, 11}) {
      const std::size_t count = 9001 / size_of(dtype);
      const Case one(dtype, op, source_count, count, random);
      for (const Isa isa : isas()) {
        for (std::size_t at = 0; at < source_count; at += 1 + source_count / 4) {
          Bytes both = one.arrays[at];
          auto* target = both.data() + (static_cast<const unsigned char*>(one.sources[at]) - one.arrays[at].data());
          std::vector<const void*> sources = one.sources;
          sources[at] = target;
          kernels::reduce(isa, target, sources, count, dtype, op);
          one.expect(target, str(one.name(isa), " into source ", at));
        }
      }
    }
  });
}

TEST(reduce_gives_equal_bits_for_any_slices) {
  std::mt19937 random(4);
  for_all([&](DType dtype, ReduceOp op) {
    for (const std::size_t source_count : {2, 3, 4, 7}) {
      const std::size_t count = 4500 / size_of(dtype);
      const Case one(dtype, op, source_count, count, random);
      for (const Isa isa : isas()) {
        Bytes target(one.expected.size());
        for (std::size_t done = 0; done < count;) {
          const std::size_t now = std::min<std::size_t>(count - done, 1 + random() % 90);
          std::vector<const void*> sources;
          for (const void* source : one.sources) {
            sources.push_back(static_cast<const unsigned char*>(source) + done * one.bytes);
          }
          kernels::reduce(isa, target.data() + done * one.bytes, sources, now, dtype, op);
          done += now;
        }
        one.expect(target.data(), str(one.name(isa), " in slices"));
      }
    }
  });
}

TEST(reduce_of_nothing_touches_nothing) {
  for_all([](DType dtype, ReduceOp op) {
    const std::vector<const void*> sources(5, nullptr);
    for (std::size_t source_count = 1; source_count <= 5; ++source_count) {
      reduce_cpu(nullptr, {sources.data(), source_count}, 0, dtype, op);
    }
  });
  stream_copy(nullptr, nullptr, 0);
}

TEST(reduce_takes_the_best_of_this_machine) {
  // The entry points without an argument for it: the same results again.
  std::mt19937 random(5);
  for_all([&](DType dtype, ReduceOp op) {
    const Case one(dtype, op, 3, 100, random);
    Bytes target(one.expected.size());
    reduce_cpu(target.data(), one.sources, one.count, dtype, op);
    one.expect(target.data(), one.name(detect_isa()));
  });
}

TEST(stream_copy_is_a_copy) {
  Bytes source(2000);
  for (std::size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<unsigned char>(i * 7 + i / 251);
  }
  for (const Isa isa : isas()) {
    for (std::size_t to = 0; to < 66; ++to) {
      for (const std::size_t bytes : {0, 1, 3, 63, 64, 65, 127, 128, 129, 200, 1700}) {
        Bytes target(2000, 0xa5);
        const std::size_t from = (to * 13) % 67;
        kernels::stream_copy(isa, target.data() + to, source.data() + from, bytes);
        kernels::stream_fence();
        CHECK(std::memcmp(target.data() + to, source.data() + from, bytes) == 0);
        CHECK(to == 0 || target[to - 1] == 0xa5);
        CHECK_EQ(target[to + bytes], 0xa5);
      }
    }
  }
}

// Large ones advance in several places; no byte may be left out where they meet.
TEST(stream_copy_of_much_is_a_copy) {
  constexpr std::size_t kMost = (std::size_t{5} << 20) + 100;
  Bytes source(kMost + 128);
  std::mt19937 random(6);
  std::generate(source.begin(), source.end(), [&random] { return static_cast<unsigned char>(random()); });
  for (const Isa isa : isas()) {
    for (const std::size_t bytes : {std::size_t{65535}, std::size_t{65536}, std::size_t{65536 + 127},
                                    std::size_t{100003}, std::size_t{600001}, std::size_t{2} << 20, kMost}) {
      for (const std::size_t to : {0, 1, 63}) {
        Bytes target(bytes + 128, 0xa5);
        kernels::stream_copy(isa, target.data() + to, source.data() + 5, bytes);
        kernels::stream_fence();
        CHECK(std::memcmp(target.data() + to, source.data() + 5, bytes) == 0);
        CHECK(to == 0 || target[to - 1] == 0xa5);
        CHECK_EQ(target[to + bytes], 0xa5);
      }
    }
  }
}
