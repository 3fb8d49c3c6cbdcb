// pack/: every cast and scale against plain scalar arithmetic, in every instruction set of this machine.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "native/check.h"
#include "pack/convert.h"
#include "pack/convert_x86.h"
#include "pack/copy_bytes.h"
#include "pack/copy_runs.h"
#include "pack/element.h"
#include "pack/isa.h"
#include "pack/pack.h"
#include "pack/reduce_kernels.h"
#include "pack/step_math.h"

using namespace hpcomm;

namespace {

struct Path {
  const char* name;
  Isa isa;

  void run(const std::vector<CopyItem>& items, const double* factor, std::int32_t* first_bad) const {
    convert::run_copies(isa, items, factor, first_bad);
  }
};

// Those that this machine has, also the ones that it would not choose.
std::vector<Path> paths() {
  std::vector<Path> all{{"base", Isa::kBase}};
  if (detect_isa() >= Isa::kAvx2) {
    all.push_back({"avx2", Isa::kAvx2});
  }
  if (detect_isa() >= Isa::kAvx512) {
    all.push_back({"avx512", Isa::kAvx512});
  }
  return all;
}

constexpr std::array<DType, 6> kFloats{DType::kFloat16, DType::kBFloat16,     DType::kFloat32,
                                       DType::kFloat64, DType::kFloat8E4M3FN, DType::kFloat8E5M2};
constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();

// --- The reference: values as doubles, which hold every one of these types exactly.
// -----------------------------------

double decode(DType dtype, const unsigned char* element) {
  switch (dtype) {
    case DType::kFloat16: {
      std::uint16_t bits;
      std::memcpy(&bits, element, sizeof bits);
      const double sign = (bits & 0x8000U) != 0 ? -1 : 1;
      const int exponent = (bits >> 10) & 31;
      const int fraction = bits & 1023;
      if (exponent == 31) {
        return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                             : sign * std::numeric_limits<double>::infinity();
      }
      return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
    }
    case DType::kBFloat16: {
      std::uint16_t bits;
      std::memcpy(&bits, element, sizeof bits);
      const double sign = (bits & 0x8000U) != 0 ? -1 : 1;
      const int exponent = (bits >> 7) & 255;
      const int fraction = bits & 127;
      if (exponent == 255) {
        return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                             : sign * std::numeric_limits<double>::infinity();
      }
      return sign * (exponent == 0 ? std::ldexp(fraction, -133) : std::ldexp(128 + fraction, exponent - 134));
    }
    case DType::kFloat32: {
      float value;
      std::memcpy(&value, element, sizeof value);
      return value;
    }
    case DType::kFloat64: {
      double value;
      std::memcpy(&value, element, sizeof value);
      return value;
    }
    case DType::kFloat8E4M3FN: {
      const double sign = (*element & 0x80U) != 0 ? -1 : 1;
      const int exponent = (*element >> 3) & 15;
      const int fraction = *element & 7;
      if (exponent == 15 && fraction == 7) {
        return std::numeric_limits<double>::quiet_NaN();
      }
      return sign * (exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10));
    }
    case DType::kFloat8E5M2: {
      const double sign = (*element & 0x80U) != 0 ? -1 : 1;
      const int exponent = (*element >> 2) & 31;
      const int fraction = *element & 3;
      if (exponent == 31) {
        return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                             : sign * std::numeric_limits<double>::infinity();
      }
      return sign * (exponent == 0 ? std::ldexp(fraction, -16) : std::ldexp(4 + fraction, exponent - 17));
    }
    default:
      return 0;
  }
}

// To the nearest multiple of what one bit is worth at this magnitude, ties to even.
double round_to(double value, int fraction_bits, int smallest_exponent, double overflow) {
  if (std::isnan(value) || std::isinf(value) || value == 0) {
    return value;
  }
  const int exponent = std::max(std::ilogb(value), smallest_exponent);
  const double rounded =
      std::ldexp(std::nearbyint(std::ldexp(value, fraction_bits - exponent)), exponent - fraction_bits);
  const double magnitude =
      std::fabs(rounded) >= overflow ? std::numeric_limits<double>::infinity() : std::fabs(rounded);
  return std::copysign(magnitude, value);
}

double expected(DType from, DType to, double value, std::optional<double> factor) {
  const bool wide = from == DType::kFloat64 || to == DType::kFloat64;
  double product = value;
  if (factor) {
    product = wide ? value * *factor : static_cast<double>(static_cast<float>(value) * static_cast<float>(*factor));
  }
  // Like torch, a double goes to 16 bits by way of float32.
  switch (to) {
    case DType::kFloat16:
      return round_to(static_cast<float>(product), 10, -14, 65536);
    case DType::kBFloat16:
      return round_to(static_cast<float>(product), 7, -126, std::ldexp(1.0, 128));
    case DType::kFloat32:
      return static_cast<float>(product);
    case DType::kFloat8E4M3FN: {
      // Without infinity: what is too large, infinity too, is the largest number there is.
      const double rounded = round_to(static_cast<float>(product), 3, -6, 480);
      return std::isinf(rounded) ? std::copysign(448, rounded) : rounded;
    }
    case DType::kFloat8E5M2:
      return round_to(static_cast<float>(product), 2, -14, 65536);
    default:
      return product;
  }
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// --- Inputs ----------------------------------------------------------------------------------------------------------

using Bytes = std::vector<unsigned char>;

template <typename T>
void push(Bytes& bytes, T value) {
  const auto* p = reinterpret_cast<const unsigned char*>(&value);
  bytes.insert(bytes.end(), p, p + sizeof value);
}

// Specials, denormals, ties, and random bit patterns (of 16-bit types: every pattern there is).
Bytes inputs(DType dtype) {
  Bytes bytes;
  std::mt19937_64 random(1);
  if (size_of(dtype) == 1) {
    for (unsigned bits = 0; bits < 65536; ++bits) {
      push(bytes, static_cast<std::uint8_t>(bits));
    }
    return bytes;
  }
  if (size_of(dtype) == 2) {
    for (unsigned bits = 0; bits < 65536; ++bits) {
      push(bytes, static_cast<std::uint16_t>(bits));
    }
    return bytes;
  }
  if (dtype == DType::kFloat32) {
    for (std::uint32_t high = 0; high < 65536; high += 7) {
      // Around the tie between two bfloat16, for even and odd ones.
      for (std::uint32_t low : {0U, 1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
        push(bytes, high << 16 | low);
      }
    }
    // The ties of both float8, the numbers beside them, and where they end.
    for (int exponent = -20; exponent <= 17; ++exponent) {
      for (int sixteenths = 16; sixteenths < 32; ++sixteenths) {
        const float value = std::ldexp(static_cast<float>(sixteenths), exponent - 4);
        for (float near : {value, std::nextafter(value, 0.0F), std::nextafter(value, 1e9F)}) {
          push(bytes, near);
          push(bytes, -near);
        }
      }
    }
    for (float value : {65504.0F, 65519.0F, 65520.0F, 65536.0F, 5.9604645e-08F, 2.9802322e-08F, 2.9802326e-08F,
                        6.1035156e-05F, 2049.0F, 2051.0F, 3.4028235e38F, 1e-45F}) {
      push(bytes, value);
      push(bytes, -value);
    }
    for (int i = 0; i < 20000; ++i) {
      push(bytes, static_cast<std::uint32_t>(random()));
    }
    return bytes;
  }
  using Limits = std::numeric_limits<double>;
  for (double value : {0.0, 1.0, Limits::max(), Limits::min(), Limits::denorm_min(), Limits::infinity(),
                       Limits::quiet_NaN(), 3.4028235677973366e38, 1e300, 1e-300, 1.00390625, 1.01171875}) {
    push(bytes, value);
    push(bytes, -value);
  }
  for (int i = 0; i < 20000; ++i) {
    push(bytes, random());
    // Most random doubles are beyond float32; these are not.
    push(bytes, std::ldexp(static_cast<double>(random()) / 1e18, static_cast<int>(random() % 300) - 150));
  }
  return bytes;
}

// A buffer with guards around it, in which a byte written too far is seen.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes, unsigned char fill = 0xa5)
      : bytes_(bytes), memory_(bytes + 2 * kGuard + 64, 0x5a) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data() + kGuard);
    begin_ = memory_.data() + kGuard + (64 - address % 64) % 64;
    std::fill(begin_, begin_ + bytes, fill);
  }
  [[nodiscard]] unsigned char* data() const { return begin_; }
  [[nodiscard]] BufferView view(DType dtype = DType::kUInt8) const {
    return {begin_, bytes_, bytes_ / size_of(dtype), dtype, {}};
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  [[nodiscard]] bool intact() const {
    const auto untouched = [](unsigned char byte) { return byte == 0x5a; };
    return std::all_of(memory_.data(), begin_, untouched) &&
           std::all_of(begin_ + bytes_, memory_.data() + memory_.size(), untouched);
  }

 private:
  static constexpr std::size_t kGuard = 128;
  std::size_t bytes_;
  mutable Bytes memory_;
  unsigned char* begin_;
};

void check_convert(const Path& path, DType from, DType to, const Bytes& source, std::optional<double> factor) {
  const std::size_t count = source.size() / size_of(from);
  const Guarded target(count * size_of(to));
  const double value = factor.value_or(0);
  path.run({{source.data(), target.data(), count, from, to}}, factor ? &value : nullptr, nullptr);
  CHECK(target.intact());
  // The same bytes past the caches, from where the target is not aligned either.
  const Guarded streamed(count * size_of(to));
  path.run({{source.data(), streamed.data(), count, from, to, Reader::kOthers}}, factor ? &value : nullptr, nullptr);
  CHECK(streamed.intact());
  CHECK(count == 0 || std::memcmp(streamed.data(), target.data(), count * size_of(to)) == 0);
  int wrong = 0;
  for (std::size_t i = 0; i < count && wrong < 3; ++i) {
    const double input = decode(from, source.data() + i * size_of(from));
    const double got = decode(to, target.data() + i * size_of(to));
    const double want = expected(from, to, input, factor);
    if (!same(got, want)) {
      ++wrong;
      check::fail(__FILE__, __LINE__,
                  str(path.name, ": ", to_string(from), " ", input, " -> ", to_string(to), ", factor ",
                      factor ? str(*factor) : "none", ": ", got, ", not ", want));
    }
  }
}

Scale scale_of(double factor) { return {std::make_shared<double>(factor)}; }

}  // namespace

TEST(pack_casts_like_scalar_code) {
  for (DType from : kFloats) {
    const Bytes source = inputs(from);
    for (DType to : kFloats) {
      for (const Path& path : paths()) {
        check_convert(path, from, to, source, std::nullopt);
      }
    }
  }
}

TEST(pack_scales_like_scalar_code) {
  using Limits = std::numeric_limits<double>;
  for (DType from : kFloats) {
    const Bytes source = inputs(from);
    for (DType to : kFloats) {
      for (const Path& path : paths()) {
        for (double factor : {1.0, 1.0 / 3, -0.0, 1e30, 1e-30, Limits::infinity(), Limits::quiet_NaN()}) {
          check_convert(path, from, to, source, factor);
        }
      }
    }
  }
}

TEST(pack_handles_every_length) {
  // Vector bodies and scalar tails: lengths around every vector width, from places that are aligned to the element
  // only.
  for (DType from : kFloats) {
    const Bytes all = inputs(from);
    for (DType to : kFloats) {
      for (const Path& path : paths()) {
        for (std::size_t count = 0; count < 140; ++count) {
          // From the first ones on, many are denormals.
          for (const std::size_t start : {std::size_t{0}, 1024 + count}) {
            const auto first = all.begin() + static_cast<std::ptrdiff_t>(start * size_of(from));
            check_convert(path, from, to, Bytes(first, first + static_cast<std::ptrdiff_t>(count * size_of(from))),
                          0.5);
          }
        }
      }
    }
  }
}

TEST(pack_of_a_run_is_that_of_each) {
  // Short tensors and long ones in turn, as each of them finds what is fetched for the next: as a list that may lie in
  // a cache, and with what makes it come from memory, zeros and another type, behind it.
  constexpr std::size_t kMuch = std::size_t{5} << 20;
  const Bytes much(kMuch);
  Bytes much_copied(kMuch);
  for (DType from : kFloats) {
    const Bytes all = inputs(from);
    for (DType to : kFloats) {
      for (const Path& path : paths()) {
        std::vector<CopyItem> items;
        std::vector<std::unique_ptr<Guarded>> together;
        std::size_t start = 0;
        for (const std::size_t count : {3000, 0, 300, 257, 64, 5, 1024, 1025, 2047, 4100, 5000, 513, 511, 1, 4095}) {
          together.push_back(std::make_unique<Guarded>(count * size_of(to)));
          items.push_back({all.data() + start * size_of(from), together.back()->data(), count, from, to});
          start += 1 + count / 8;
        }
        for (std::size_t more = 0; more < 40; ++more) {  // enough short ones to fetch ahead
          together.push_back(std::make_unique<Guarded>(more * size_of(to)));
          items.push_back({all.data() + more * size_of(from), together.back()->data(), more, from, to});
        }
        path.run(items, nullptr, nullptr);
        std::vector<Bytes> first;
        for (const CopyItem& item : items) {
          auto* const target = static_cast<unsigned char*>(item.target);
          first.emplace_back(target, target + item.count * size_of(to));
          std::memset(target, 0x33, item.count * size_of(to));
        }
        std::vector<CopyItem> more_than_a_cache = items;
        more_than_a_cache.push_back({much.data(), much_copied.data(), kMuch / size_of(from) / 2, from, from});
        more_than_a_cache.push_back({nullptr, much_copied.data(), 100, from, to});
        more_than_a_cache.push_back({much.data(), much_copied.data(), 5000, DType::kInt64, DType::kInt64});
        path.run(more_than_a_cache, nullptr, nullptr);
        for (std::size_t i = 0; i < items.size(); ++i) {
          CHECK(std::equal(first[i].begin(), first[i].end(), together[i]->data()));
          const Guarded alone(items[i].count * size_of(to));
          CopyItem item = items[i];
          item.target = alone.data();
          path.run({item}, nullptr, nullptr);
          CHECK(together[i]->intact());
          CHECK(item.count == 0 || std::memcmp(alone.data(), items[i].target, item.count * size_of(to)) == 0);
        }
      }
    }
  }
}

TEST(pack_fetches_what_its_list_needs) {
  using convert::Fetching;
  using convert::fetching_of;
  const std::unique_ptr<unsigned char[]> memory(new unsigned char[std::size_t{64} << 20]);
  unsigned char* const buffer = memory.get() + (std::size_t{32} << 20);
  // 1,000 tensors in a buffer of another type; between each two of them lies as much again.
  const auto items_of = [&](std::size_t count, DType tensor, DType wire, bool packs) {
    std::vector<CopyItem> items;
    for (std::size_t i = 0; i < 1000; ++i) {
      unsigned char* const one = memory.get() + 2 * i * count * size_of(tensor);
      unsigned char* const place = buffer + i * count * size_of(wire);
      items.push_back(packs ? CopyItem{one, place, count, tensor, wire} : CopyItem{place, one, count, wire, tensor});
    }
    return items;
  };
  for (const bool packs : {true, false}) {
    const Fetching scattered = packs ? Fetching::kSources : Fetching::kTargets;
    for (const DType wire : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
      const std::vector<CopyItem> few = items_of(64, DType::kFloat32, wire, packs);
      CHECK(fetching_of(few.data(), few.size(), false) == scattered);
      CHECK(fetching_of(few.data(), few.size(), true) == Fetching::kIntel);
      std::vector<CopyItem> many = items_of(1024, DType::kFloat32, wire, packs);
      CHECK(fetching_of(many.data(), many.size(), false) == Fetching::kAll);
      std::swap(many[1], many.back());  // ends that lie near each other
      CHECK(fetching_of(many.data(), many.size(), false) == Fetching::kAll);
    }
  }
  (void)fetching_of(nullptr, 0, false);
  const CopyItem zeros{nullptr, buffer, 5, DType::kFloat32, DType::kFloat32};
  (void)fetching_of(&zeros, 1, false);
}

TEST(pack_without_arithmetic_is_bit_for_bit) {
  // Also signalling NaNs, bools that are neither 0 nor 1, and a factor of one.
  const std::vector<DType> all{DType::kBool,         DType::kUInt8,      DType::kInt8,         DType::kInt16,
                               DType::kInt32,        DType::kInt64,      DType::kFloat16,      DType::kBFloat16,
                               DType::kFloat32,      DType::kFloat64,    DType::kComplex64,    DType::kComplex128,
                               DType::kFloat8E4M3FN, DType::kFloat8E5M2, DType::kUInt16,       DType::kUInt32,
                               DType::kUInt64,       DType::kComplex32,  DType::kFloat8E8M0FNU};
  std::mt19937 random(2);
  Bytes source(1600);
  std::generate(source.begin(), source.end(), [&random] { return static_cast<unsigned char>(random()); });
  for (DType dtype : all) {
    CHECK(can_convert(dtype, dtype));
    for (const Path& path : paths()) {
      for (double factor : {1.0, 0.25}) {
        if (factor != 1.0 && is_floating(dtype)) {
          continue;
        }
        const Guarded target(source.size());
        path.run({{source.data(), target.data(), source.size() / size_of(dtype), dtype, dtype}}, &factor, nullptr);
        CHECK(std::memcmp(target.data(), source.data(), source.size()) == 0);
        CHECK(target.intact());
      }
    }
  }
}

TEST(copies_of_bytes_keep_to_their_place) {
  // Every way of copying a tensor, by its length, at addresses that are aligned to nothing; large ones are their own
  // targets, or go past the caches when others read them. Runs of equal items are cut by those of another kind.
  constexpr std::size_t kGuard = 64;
  std::vector<std::size_t> sizes;
  for (std::size_t size = 0; size < 330; ++size) {
    sizes.push_back(size);
  }
  for (const std::size_t size : {511, 512, 1000, 1023, 1024, 1025, 4096, 16384, 70001}) {
    sizes.push_back(size);
  }
  for (const Path& path : paths()) {
    for (const Reader reader : {Reader::kThisCore, Reader::kOthers}) {
      std::vector<std::vector<unsigned char>> sources;
      std::vector<std::vector<unsigned char>> targets;
      std::vector<CopyItem> items;
      for (const std::size_t size : sizes) {
        auto& source = sources.emplace_back(size + kGuard);
        for (std::size_t i = 0; i < source.size(); ++i) {
          source[i] = static_cast<unsigned char>(i * 7 + size);
        }
        targets.emplace_back(size + 2 * kGuard, 0xEE);
      }
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const std::size_t shift = i % 5;
        items.push_back({sources[i].data() + shift, targets[i].data() + kGuard - shift, sizes[i], DType::kUInt8,
                         DType::kUInt8, reader});
        if (i % 50 == 0) {
          items.push_back({nullptr, nullptr, 0, DType::kUInt8, DType::kUInt8, reader});
          items.push_back({sources[i].data(), sources[i].data(), sizes[i], DType::kInt8, DType::kInt8, reader});
        }
      }
      const std::vector<unsigned char> itself = sources.back();
      items.push_back(
          {sources.back().data(), sources.back().data(), sizes.back(), DType::kUInt8, DType::kUInt8, reader});
      path.run(items, nullptr, nullptr);
      CHECK(sources.back() == itself);
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const std::size_t shift = i % 5;
        std::vector<unsigned char> expected(targets[i].size(), 0xEE);
        std::copy_n(sources[i].data() + shift, sizes[i], expected.data() + kGuard - shift);
        CHECK(targets[i] == expected);
      }
    }
  }
}

TEST(pack_and_unpack_many_tensors) {
  // 1 to 4,097 tensors of odd sizes and mixed types: there and back, through a narrower wire.
  const auto stream = make_caller_stream();
  std::mt19937 random(3);
  for (std::size_t tensors : {1U, 2U, 17U, 256U, 4097U}) {
    std::vector<TensorSize> sizes;
    std::vector<std::vector<float>> floats;
    std::vector<std::vector<std::int64_t>> ints;
    std::vector<const void*> sources;
    for (std::size_t i = 0; i < tensors; ++i) {
      const std::size_t count = i % 5 == 4 ? 0 : random() % 67;
      if (i % 3 == 2) {
        std::vector<std::int64_t> values(count);
        std::generate(values.begin(), values.end(), [&random] { return static_cast<std::int64_t>(random()) << 31; });
        ints.push_back(std::move(values));
        sources.push_back(ints.back().data());
        sizes.push_back({count, DType::kInt64});
      } else {
        std::vector<float> values(count);
        std::generate(values.begin(), values.end(), [&random] { return static_cast<float>(random() % 256); });
        floats.push_back(std::move(values));
        sources.push_back(floats.back().data());
        sizes.push_back({count, DType::kFloat32});
      }
    }
    const Layout layout(sizes, DType::kBFloat16);  // holds integers below 256 exactly
    const Guarded buffer(layout.bytes());
    pack(*stream, layout, sources, buffer.view(), scale_of(0.5));
    CHECK(buffer.intact());

    std::vector<std::vector<float>> floats_back;
    std::vector<std::vector<std::int64_t>> ints_back;
    std::vector<void*> targets;
    for (const TensorSize& size : sizes) {
      if (size.dtype == DType::kInt64) {
        ints_back.emplace_back(size.count, -1);
        targets.push_back(ints_back.back().data());
      } else {
        floats_back.emplace_back(size.count, -1.0F);
        targets.push_back(floats_back.back().data());
      }
    }
    unpack(*stream, layout, buffer.view(), targets, scale_of(2.0));
    CHECK(floats == floats_back);
    CHECK(ints == ints_back);
  }
}

TEST(pack_fills_zeros_for_null_and_leaves_padding_alone) {
  const auto stream = make_caller_stream();
  const Layout layout({{3, DType::kFloat32}, {5, DType::kInt16}, {0, DType::kFloat64}});
  const Guarded buffer(layout.bytes(), 0xff);
  const std::vector<float> values{1, 2, 3};
  pack(*stream, layout, {values.data(), nullptr, nullptr}, buffer.view(), scale_of(std::nan("")));
  // NaN * 0 must not come in: a missing gradient is zeros whatever the factor.
  CHECK(std::all_of(buffer.data() + 64, buffer.data() + 74, [](unsigned char byte) { return byte == 0; }));
  CHECK(std::all_of(buffer.data() + 12, buffer.data() + 64, [](unsigned char byte) { return byte == 0xff; }));
  CHECK(std::all_of(buffer.data() + 74, buffer.data() + 128, [](unsigned char byte) { return byte == 0xff; }));
}

TEST(unpack_skips_null) {
  const auto stream = make_caller_stream();
  const Layout layout({{2, DType::kFloat32}, {2, DType::kFloat32}});
  const Guarded buffer(layout.bytes());
  const std::array<float, 2> a{1, 2};
  const std::array<float, 2> b{3, 4};
  pack(*stream, layout, {a.data(), b.data()}, buffer.view());
  std::array<float, 2> target{};
  unpack(*stream, layout, buffer.view(), {nullptr, target.data()});
  CHECK(target == b);
}

TEST(pack_of_nothing_is_nothing) {
  const auto stream = make_caller_stream();
  pack(*stream, Layout(), {}, BufferView{});
  unpack(*stream, Layout(), BufferView{}, {});
  scale(*stream, {}, scale_of(2));
  const Layout empty({{0, DType::kFloat32}});
  pack(*stream, empty, {nullptr}, BufferView{});
  unpack(*stream, empty, BufferView{}, {nullptr});
  CHECK(true);
}

TEST(scale_multiplies_in_place) {
  const auto stream = make_caller_stream();
  std::vector<float> a{1, -2, 3};
  std::vector<double> b{0.5};
  const auto view_of = [](auto& values, DType dtype) {
    return BufferView{values.data(), values.size() * size_of(dtype), values.size(), dtype, {}};
  };
  scale(*stream, {view_of(a, DType::kFloat32), view_of(b, DType::kFloat64)}, scale_of(0.25));
  CHECK_EQ(a, (std::vector<float>{0.25, -0.5, 0.75}));
  CHECK_EQ(b, std::vector<double>{0.125});
  scale(*stream, {view_of(a, DType::kFloat32)}, {});
  CHECK_EQ(a, (std::vector<float>{0.25, -0.5, 0.75}));
}

TEST(scale_reads_its_factor_when_it_runs) {
  const auto stream = make_worker_stream("pack test");
  const auto gate = std::make_shared<std::atomic<bool>>(false);
  const auto factor = std::make_shared<double>(1.0);
  std::vector<float> values{3};
  stream->enqueue([gate] {
    while (!*gate) {
      std::this_thread::yield();
    }
  });
  scale(*stream, {{values.data(), 4, 1, DType::kFloat32, {}}}, {factor});
  *factor = 2.0;
  *gate = true;
  stream->synchronize();
  CHECK_EQ(values[0], 6.0F);
}

TEST(pack_refuses_wrong_arguments) {
  const auto stream = make_caller_stream();
  const Layout layout({{3, DType::kFloat32}, {3, DType::kInt32}});
  const Guarded buffer(layout.bytes());
  const std::array<float, 3> values{};
  std::array<float, 3> target{};
  const std::vector<const void*> sources{values.data(), values.data()};
  const std::vector<void*> targets{target.data(), target.data()};
  BufferView shorter = buffer.view();
  --shorter.bytes;
  CHECK_THROWS(ErrorKind::kInvalidArgument, pack(*stream, layout, {values.data()}, buffer.view()), "2 entries, got 1");
  CHECK_THROWS(ErrorKind::kInvalidArgument, pack(*stream, layout, sources, shorter),
               "needs 128 bytes, the buffer has 127");
  CHECK_THROWS(ErrorKind::kInvalidArgument, unpack(*stream, layout, buffer.view(), {target.data()}), "got 1 tensors");
  CHECK_THROWS(ErrorKind::kInvalidArgument, unpack(*stream, layout, shorter, targets), "the buffer has 127");
  CHECK_THROWS(ErrorKind::kInvalidArgument, scale(*stream, {{target.data(), 12, 3, DType::kInt32, {}}}, scale_of(2)),
               "only floating point");

  const Layout narrow({{4, DType::kFloat32}}, DType::kInt8);
  CHECK_THROWS(ErrorKind::kInvalidArgument, pack(*stream, narrow, {values.data()}, buffer.view()),
               "no kernel casts float32 to int8");
  CHECK_THROWS(ErrorKind::kInvalidArgument, unpack(*stream, narrow, buffer.view(), {target.data()}),
               "no kernel casts int8 to float32");
  CHECK(buffer.intact());
}

TEST(pack_knows_what_it_can_do) {
  const int last = static_cast<int>(DType::kFloat8E8M0FNU);
  for (int from = 0; from <= last; ++from) {
    for (int to = 0; to <= last; ++to) {
      const auto is_common = [](int code) {
        return std::find(kFloats.begin(), kFloats.end(), static_cast<DType>(code)) != kFloats.end();
      };
      CHECK_EQ(can_convert(static_cast<DType>(from), static_cast<DType>(to)),
               from == to || (is_common(from) && is_common(to)));
      CHECK_EQ(can_scale(static_cast<DType>(from)), is_common(from));
    }
  }
}

// What the kernel reads must live until it has run, also when the caller forgets it at once.
TEST(pack_holds_what_it_was_given) {
  const auto stream = make_worker_stream("pack test");
  const auto gate = std::make_shared<std::atomic<bool>>(false);
  stream->enqueue([gate] {
    while (!*gate) {
      std::this_thread::yield();
    }
  });
  const Layout layout({{2, DType::kFloat32}});
  const auto buffer = std::make_shared<Guarded>(layout.bytes());
  auto values = std::make_shared<std::vector<float>>(std::vector<float>{1, 2});
  const std::weak_ptr<std::vector<float>> watched = values;
  pack(*stream, layout, {values->data()}, buffer->view(), {}, values);
  unpack(*stream, layout, buffer->view(), {values->data()}, {}, values);
  scale(*stream, {{values->data(), 8, 2, DType::kFloat32, {}}}, scale_of(2), values);
  values.reset();
  CHECK(!watched.expired());
  *gate = true;
  stream->synchronize();
  CHECK(watched.expired());
  CHECK_EQ(decode(DType::kFloat32, buffer->data() + 4), 2.0);
}

TEST(pack_finds_the_first_bad_tensor) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (DType from : kFloats) {
    for (DType to : kFloats) {
      for (const Path& path : paths()) {
        for (const double factor : {1.0, 0.5}) {
          // Long enough for several pieces of the checking loop; bad in one place of two tensors.
          constexpr std::size_t kCount = 4500;
          const std::vector<double> ones(kCount, 1.0);
          const Guarded good(kCount * size_of(from));
          run_copies_cpu({{ones.data(), good.data(), kCount, DType::kFloat64, from}}, nullptr);
          for (const std::size_t place : {std::size_t{0}, std::size_t{2048}, kCount - 1}) {
            const Guarded bad(kCount * size_of(from));
            std::memcpy(bad.data(), good.data(), kCount * size_of(from));
            const double value = from == DType::kFloat8E4M3FN ? std::nan("") : infinity;
            run_copies_cpu({{&value, bad.data() + place * size_of(from), 1, DType::kFloat64, from}}, nullptr);
            const Guarded target(5 * kCount * size_of(to));
            const Guarded unchecked(5 * kCount * size_of(to));
            const auto items = [&](const Guarded& into, Reader reader) {
              const std::array<const void*, 5> sources{good.data(), nullptr, bad.data(), good.data(), bad.data()};
              std::vector<CopyItem> list;
              for (std::size_t i = 0; i < sources.size(); ++i) {
                list.push_back({sources[i], into.data() + i * kCount * size_of(to), kCount, from, to, reader});
              }
              return list;
            };
            path.run(items(unchecked, Reader::kThisCore), &factor, nullptr);
            for (const std::int32_t before : {kNone, 2, 1}) {
              for (const Reader reader : {Reader::kThisCore, Reader::kOthers}) {
                std::memset(target.data(), 0x33, 5 * kCount * size_of(to));
                std::int32_t first_bad = before;
                path.run(items(target, reader), &factor, &first_bad);
                CHECK_EQ(first_bad, std::min(before, 2));
                CHECK(std::memcmp(target.data(), unchecked.data(), 5 * kCount * size_of(to)) == 0);
              }
            }
          }
        }
      }
    }
  }
}

// The source times the scale is looked at, in the type in which it is multiplied; not what the cast makes of it.
TEST(pack_checks_before_the_cast) {
  const auto stream = make_caller_stream();
  const auto check_of = [] { return FiniteCheck{std::make_shared<std::int32_t>(kNone)}; };
  const Layout layout({{1, DType::kInt64}, {1, DType::kFloat32}}, DType::kFloat16);
  const Guarded buffer(layout.bytes());
  const std::int64_t whole = -1;  // all ones, and no floating point number
  const float large = 1e30F;
  FiniteCheck check = check_of();
  pack(*stream, layout, {&whole, &large}, buffer.view(), {}, nullptr, check);
  CHECK_EQ(*check.first_bad, kNone);
  CHECK(std::isinf(decode(DType::kFloat16, buffer.data() + 64)));
  pack(*stream, layout, {&whole, &large}, buffer.view(), scale_of(1e10), nullptr, check);
  CHECK_EQ(*check.first_bad, 1);

  std::vector<float> values{1, 1e30F};
  const std::vector<BufferView> views{{values.data(), 4, 1, DType::kFloat32, {}},
                                      {values.data() + 1, 4, 1, DType::kFloat32, {}}};
  check = check_of();
  scale(*stream, views, scale_of(1e10), nullptr, check);
  CHECK_EQ(*check.first_bad, 1);
  CHECK(std::isinf(values[1]));
  const Layout wide({{1, DType::kFloat64}, {1, DType::kFloat32}});
  const Guarded target(wide.bytes());
  const double huge = 1e300;
  check = check_of();
  pack(*stream, wide, {&huge, values.data()}, target.view(), scale_of(2), nullptr, check);
  CHECK_EQ(*check.first_bad, kNone);
}

TEST(clear_fills_zeros) {
  const auto stream = make_caller_stream();
  const Guarded buffer(77, 0xff);
  clear(*stream, buffer.view());
  CHECK(std::all_of(buffer.data(), buffer.data() + 77, [](unsigned char byte) { return byte == 0; }));
  CHECK(buffer.intact());
  clear(*stream, BufferView{});
}

TEST(finish_loss_makes_the_factor) {
  const auto stream = make_caller_stream();
  std::array<double, 5> sums{10, 3, 2, 0, 0};
  double factor = -1;
  finish_loss(*stream, sums.data(), &factor, true);
  CHECK_EQ(factor, 1.0 / 3);
  CHECK_EQ(sums, (std::array<double, 5>{10, 3, 2, 0, 3}));
  sums[LossSums::kWeight] = 5;
  sums[LossSums::kKeeping] = 1;
  finish_loss(*stream, sums.data(), &factor, true);
  CHECK_EQ(factor, 1.0 / 8);
  CHECK_EQ(sums, (std::array<double, 5>{10, 5, 2, 1, 8}));
  sums[LossSums::kKeeping] = 0;  // dropped on all ranks
  finish_loss(*stream, sums.data(), &factor, false);
  CHECK_EQ(factor, 1.0 / 5);
  CHECK_EQ(sums, (std::array<double, 5>{10, 5, 2, 0, 0}));
  sums[LossSums::kWeight] = 0;
  finish_loss(*stream, sums.data(), &factor, false);
  CHECK_EQ(factor, 0.0);
}

TEST(finish_loss_tells_which_ranks_take_other_steps) {
  const auto stream = make_caller_stream();
  const auto told = [&](double reducing, int ranks) {
    std::array<double, 5> sums{10, 3, reducing, 0, 0};
    double factor = -1;
    double odd = 0;
    finish_loss(*stream, sums.data(), &factor, false, nullptr, {ranks, &odd});
    CHECK_EQ(factor, 1.0 / 3);
    return odd;
  };
  constexpr auto kEvaluation = static_cast<double>(LossSums::kEvaluation);
  for (const double alike : {0.0, 3.0, 3 * kEvaluation}) {
    CHECK_EQ(told(alike, 3), 0.0);
  }
  for (const double odd : {1.0, 2.0, kEvaluation, 2 * kEvaluation, 2 * kEvaluation + 1, kEvaluation + 2}) {
    CHECK_EQ(told(odd, 3), odd);
  }
}

// In the stream's order: the sums that were there when it is its turn, and memory that lives until then.
TEST(finish_loss_waits_for_its_turn) {
  const auto stream = make_worker_stream("pack test");
  const auto gate = std::make_shared<std::atomic<bool>>(false);
  stream->enqueue([gate] {
    while (!*gate) {
      std::this_thread::yield();
    }
  });
  auto sums = std::make_shared<std::array<double, 6>>();
  const std::weak_ptr<std::array<double, 6>> watched = sums;
  double* const data = sums->data();
  finish_loss(*stream, data, data + 5, false, sums);
  const auto factor = std::make_shared<double>(0);
  stream->enqueue([data, factor] { *factor = data[5]; });
  data[LossSums::kWeight] = 4;
  stream->hold(std::move(sums));
  CHECK(!watched.expired());
  *gate = true;
  stream->synchronize();
  CHECK(watched.expired());
  CHECK_EQ(*factor, 0.25);
}
