// pack/: many tensors at a time, which are copied the quick way where there is one, against scalar arithmetic.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "native/check.h"
#include "pack/element.h"
#include "pack/pack.h"

using namespace hpcomm;

namespace {

constexpr std::size_t kTensors = 1000;
constexpr std::size_t kLongTensors = 80;

BFloat16 rounded(float value, double factor) {
  return element::narrow<BFloat16>(element::widen(value, static_cast<float>(factor)));
}

std::uint16_t bits_of(BFloat16 value) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

bool same(BFloat16 a, BFloat16 b) {
  constexpr auto is_nan = [](std::uint16_t bits) { return (bits & 0x7fffU) > 0x7f80U; };
  return bits_of(a) == bits_of(b) || (is_nan(bits_of(a)) && is_nan(bits_of(b)));
}

// Float32 tensors of many lengths, short or long ones, to be packed as bfloat16.
class Tensors {
 public:
  explicit Tensors(bool are_long = false) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<std::size_t> lengths;
    std::size_t total = 0;
    for (std::size_t i = 0; i < (are_long ? kLongTensors : kTensors); ++i) {
      lengths.push_back(are_long ? 512 + random() % (i % 3 == 0 ? 9000 : 900) : i % 5 == 0 ? 64 : random() % 70);
      total += lengths.back();
    }
    values.resize(total);
    packed.resize(total);
    for (float& value : values) {
      value = normal(random);
    }
    std::size_t first = 0;
    for (const std::size_t length : lengths) {
      items.push_back({values.data() + first, packed.data() + first, length, DType::kFloat32, DType::kBFloat16});
      first += length;
    }
  }

  // Into the first element of the first tensor from `tensor` on that has one.
  void put(std::size_t tensor, float value) {
    while (items[tensor].count == 0) {
      ++tensor;
    }
    values[static_cast<std::size_t>(static_cast<const float*>(items[tensor].source) - values.data())] = value;
  }

  void check(double factor, const std::string& what) {
    std::fill(packed.begin(), packed.end(), BFloat16{});
    run_copies_cpu(items, &factor);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      wrong += same(packed[i], rounded(values[i], factor)) ? 0 : 1;
    }
    if (wrong != 0) {
      check::fail(__FILE__, __LINE__, what + ", factor " + std::to_string(factor) + ": " + std::to_string(wrong));
    }
  }

  std::vector<float> values;
  std::vector<BFloat16> packed;
  std::vector<CopyItem> items;
};

}  // namespace

TEST(pack_short_tensors_keep_tiny_numbers) {
  using Limits = std::numeric_limits<float>;
  // The last one is exact when it is halved, and tiny then.
  for (const float value : {Limits::denorm_min(), -Limits::min() / 2, 0x1.fep-127F, 0.0F, -0.0F, Limits::infinity(),
                            Limits::quiet_NaN(), Limits::min(), 0x1.8p-126F}) {
    for (const std::size_t tensor : {0, 7, 8, 263, 264, 990}) {
      for (const double factor : {1.0, 0.5, 1e-39}) {
        Tensors tensors;
        tensors.put(tensor, value);
        tensors.check(factor, "value " + std::to_string(value) + " in " + std::to_string(tensor));
      }
    }
  }
}

TEST(pack_long_tensors_keep_tiny_numbers) {
  using Limits = std::numeric_limits<float>;
  for (const float value : {0x1.fep-127F, -Limits::min() / 2, 0x1.8p-126F}) {
    for (std::size_t tensor = 0; tensor < kLongTensors; tensor += 11) {  // wherever what is done at a time begins
      for (const double factor : {1.0, 0.5, 1e-39}) {
        Tensors tensors(true);
        tensors.put(tensor, value);
        tensors.check(factor, "value " + std::to_string(value) + " in " + std::to_string(tensor));
      }
    }
  }
  // All of them, some their own targets, between short ones.
  Tensors tensors(true);
  for (std::size_t tensor = 0; tensor < kLongTensors; ++tensor) {
    tensors.put(tensor, Limits::min() / 4);
  }
  std::vector<CopyItem>& items = tensors.items;
  std::vector<float> own(3000, 0x1.8p-127F);
  std::vector<float> few(20, 0x1.8p-127F);
  std::vector<BFloat16> few_packed(20);
  items.insert(items.begin() + 40, {own.data(), own.data(), own.size(), DType::kFloat32, DType::kBFloat16});
  items.insert(items.begin() + 20, {few.data(), few_packed.data(), few.size(), DType::kFloat32, DType::kBFloat16});
  tensors.check(1, "between short ones");
  const BFloat16 expected = rounded(0x1.8p-127F, 1);
  for (std::size_t i = 0; i < own.size(); ++i) {
    BFloat16 value{};
    std::memcpy(&value, reinterpret_cast<const char*>(own.data()) + i * sizeof value, sizeof value);
    CHECK(same(value, expected));
  }
  for (const BFloat16 value : few_packed) {
    CHECK(same(value, expected));
  }
}

TEST(pack_short_tensors_between_others) {
  // Zeros, another type, a long one, and one that is its own target, each between many short ones with tiny numbers.
  Tensors tensors;
  for (std::size_t i = 0; i < kTensors; i += 3) {
    tensors.put(i, std::numeric_limits<float>::min() / 4);
  }
  std::vector<CopyItem>& items = tensors.items;
  std::vector<std::uint16_t> zeros(100, 7);
  std::vector<double> doubles(50, 0.1);
  std::vector<double> copied(50);
  std::vector<float> large(5000, 0x1.8p-127F);
  std::vector<BFloat16> large_packed(5000);
  std::vector<float> own(40, 0x1.8p-127F);
  own[3] = 5;
  items.insert(items.begin() + 100, {nullptr, zeros.data(), zeros.size(), DType::kFloat32, DType::kBFloat16});
  items.insert(items.begin() + 300, {doubles.data(), copied.data(), 50, DType::kFloat64, DType::kFloat64});
  items.insert(items.begin() + 500, {large.data(), large_packed.data(), 5000, DType::kFloat32, DType::kBFloat16});
  items.insert(items.begin() + 700, {own.data(), own.data(), own.size(), DType::kFloat32, DType::kBFloat16});
  tensors.check(1, "between others");
  CHECK(zeros == std::vector<std::uint16_t>(100, 0));
  CHECK(copied == doubles);
  for (const BFloat16 value : large_packed) {
    CHECK(same(value, rounded(0x1.8p-127F, 1)));
  }
  for (std::size_t i = 0; i < own.size(); ++i) {
    BFloat16 value{};
    std::memcpy(&value, reinterpret_cast<const char*>(own.data()) + i * sizeof value, sizeof value);
    CHECK(same(value, rounded(i == 3 ? 5 : 0x1.8p-127F, 1)));
  }
}

#if defined(__x86_64__)
TEST(pack_leaves_the_mode_of_arithmetic) {
  constexpr unsigned kFlags = 0x3f;
  constexpr unsigned kDefault = 0x1f80;
  const unsigned before = _mm_getcsr();
  // As it is, denormals taken for zero, tiny results to zero, both (torch.set_flush_denormal), rounded up.
  for (const unsigned mode : {0U, 0x40U, 0x8000U, 0x8040U, 0x4000U}) {
    for (const float value : {1.0F, std::numeric_limits<float>::min() / 2}) {
      for (const bool are_long : {false, true}) {
        Tensors tensors(are_long);
        tensors.put(are_long ? 30 : 500, value);
        _mm_setcsr(kDefault | mode);
        tensors.check(mode == 0x4000U ? 1 : 0.5, "mode " + std::to_string(mode));
        CHECK_EQ(_mm_getcsr() & ~kFlags, kDefault | mode);
        _mm_setcsr(before);
      }
    }
  }
}
#endif
