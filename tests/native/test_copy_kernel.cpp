// pack/copy_chunk.h: the kernel of CUDA against the kernel of the CPU, bit for bit, without a GPU.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "native/check.h"
#include "native/emulated_kernel.h"
#include "pack/pack.h"

using namespace hpcomm;
using check::Machine;
using check::Memory;

namespace {

constexpr std::array<DType, 6> kFloats{DType::kFloat16, DType::kBFloat16,     DType::kFloat32,
                                       DType::kFloat64, DType::kFloat8E4M3FN, DType::kFloat8E5M2};
constexpr std::array<DType, 8> kOthers{DType::kBool,  DType::kUInt8, DType::kInt8,      DType::kInt16,
                                       DType::kInt32, DType::kInt64, DType::kComplex64, DType::kComplex128};
constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();

// A block of its own on the heap, whose end is the end of the tensor, for the address sanitizer to see.
class Tensor {
 public:
  Tensor(std::size_t bytes, std::size_t misaligned)
      : bytes_(bytes), begin_(misaligned), memory_(new unsigned char[misaligned + bytes]) {
    std::fill_n(memory_.get(), misaligned + bytes, static_cast<unsigned char>(0xa5));
  }
  [[nodiscard]] unsigned char* data() const { return memory_.get() + begin_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] bool front_intact() const {
    return std::all_of(memory_.get(), data(), [](unsigned char byte) { return byte == 0xa5; });
  }

 private:
  std::size_t bytes_;
  std::size_t begin_;
  std::unique_ptr<unsigned char[]> memory_;
};

bool is_nan(DType dtype, std::uint64_t bits) {
  switch (dtype) {
    case DType::kFloat16:
      return (bits & 0x7fffU) > 0x7c00U;
    case DType::kBFloat16:
      return (bits & 0x7fffU) > 0x7f80U;
    case DType::kFloat32:
      return (bits & 0x7fffffffU) > 0x7f800000U;
    case DType::kFloat64:
      return (bits & 0x7fffffffffffffffU) > 0x7ff0000000000000U;
    case DType::kFloat8E4M3FN:
      return (bits & 0x7fU) == 0x7fU;
    case DType::kFloat8E5M2:
      return (bits & 0x7fU) > 0x7cU;
    default:
      return false;
  }
}

std::uint64_t element_at(const unsigned char* data, std::size_t size, std::size_t i) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, data + i * size, std::min<std::size_t>(size, 8));
  return bits;
}

// Values of every kind: random bits, which are often huge, tiny or NaN; and of everyday size, which casts round.
void fill(Tensor& tensor, DType dtype, bool finite, std::mt19937_64& random) {
  std::generate_n(tensor.data(), tensor.bytes(), [&random] { return static_cast<unsigned char>(random()); });
  if (!is_floating(dtype)) {
    return;
  }
  const std::size_t size = size_of(dtype);
  for (std::size_t i = 0; i < tensor.bytes() / size; ++i) {
    if (finite || random() % 2 == 0) {
      const double value = (static_cast<double>(random() % 2000001) - 1000000) / 30000;
      const Tensor one(8, 0);
      std::memcpy(one.data(), &value, sizeof value);
      run_copies_cpu({{one.data(), tensor.data() + i * size, 1, DType::kFloat64, dtype}}, nullptr);
    }
  }
}

// A list of items with memory of its own, to be run twice.
class Job {
 public:
  void add(DType from, DType to, std::size_t count, std::size_t source_shift, std::size_t target_shift, bool null,
           bool finite, std::mt19937_64& random) {
    sources_.emplace_back(count * size_of(from), source_shift * size_of(from));
    fill(sources_.back(), from, finite, random);
    targets_.emplace_back(count * size_of(to), target_shift * size_of(to));
    wanted_.emplace_back(count * size_of(to), target_shift * size_of(to));
    items_.push_back({null ? nullptr : sources_.back().data(), targets_.back().data(), count, from, to});
  }

  // The emulated kernel and the one of the CPU, then what the two wrote and found.
  void run(std::optional<double> factor, bool check, const Machine& machine) {
    const double* const number = factor ? &*factor : nullptr;
    std::int32_t got_bad = kNone;
    std::int32_t want_bad = kNone;
    Memory memory(items_);
    check::run_emulated(items_, number, check ? &got_bad : nullptr, machine, memory);
    memory.check_complete();

    std::vector<CopyItem> items = items_;
    for (std::size_t i = 0; i < items.size(); ++i) {
      items[i].target = wanted_[i].data();
    }
    run_copies_cpu(items, number, check ? &want_bad : nullptr);
    CHECK_EQ(got_bad, want_bad);
    int wrong = 0;
    for (std::size_t i = 0; i < items.size() && wrong < 3; ++i) {
      CHECK(targets_[i].front_intact());
      wrong += compare(items_[i], wanted_[i], i, factor.value_or(1) == 1);
    }
  }

 private:
  static int compare(const CopyItem& item, const Tensor& wanted, std::size_t index, bool no_factor) {
    const auto* got = static_cast<const unsigned char*>(item.target);
    if (std::memcmp(got, wanted.data(), wanted.bytes()) == 0) {
      return 0;
    }
    // A NaN that arithmetic made is a NaN: its sign and payload are the hardware's, or those of the library that stands
    // in for it. One that was only copied keeps its bits.
    const bool copied = item.source_dtype == item.target_dtype && no_factor;
    const std::size_t size = size_of(item.target_dtype);
    for (std::size_t i = 0; i < item.count; ++i) {
      const std::uint64_t a = element_at(got, size, i);
      const std::uint64_t b = element_at(wanted.data(), size, i);
      const bool same = std::memcmp(got + i * size, wanted.data() + i * size, size) == 0;
      if (!same && (copied || !is_nan(item.target_dtype, a) || !is_nan(item.target_dtype, b))) {
        check::fail(__FILE__, __LINE__,
                    str("item ", index, ", ", to_string(item.source_dtype), " to ", to_string(item.target_dtype),
                        ", element ", i, " of ", item.count, ": ", std::hex, a, ", not ", b));
        return 1;
      }
    }
    return 0;
  }

  std::vector<Tensor> sources_;
  std::vector<Tensor> targets_;
  std::vector<Tensor> wanted_;
  std::vector<CopyItem> items_;
};

// Nothing, a few, around a packet, some chunks.
std::size_t random_count(std::mt19937_64& random, DType from, DType to) {
  const std::size_t chunk = kSmallestChunk / std::max(size_of(from), size_of(to));
  switch (random() % 16) {
    case 0:
    case 1:
      return random() % 4;
    case 2:
      return chunk + random() % 40 - 20;
    case 3:
      return chunk * (2 + random() % 2) + random() % 70;
    default:
      return random() % 140;
  }
}

void try_misalignments(DType from, DType to) {
  std::mt19937_64 random(static_cast<unsigned>(from) * 16U + static_cast<unsigned>(to));
  const std::array<std::optional<double>, 4> factors{std::nullopt, 1.0 / 3, 1.0, 1e30};
  for (std::size_t round = 0; round < factors.size(); ++round) {
    Job job;
    for (std::size_t source_shift = 0; source_shift < 16; ++source_shift) {
      for (std::size_t target_shift = round % 2; target_shift < 16; target_shift += 2) {
        job.add(from, to, random_count(random, from, to), source_shift, target_shift, random() % 16 == 0, round < 2,
                random);
      }
    }
    job.run(factors[round], round % 2 == 0, {.capacity = 100, .seed = static_cast<unsigned>(round)});
  }
}

}  // namespace

TEST(copy_kernel_casts_every_pair_from_every_address) {
  for (DType from : kFloats) {
    for (DType to : kFloats) {
      try_misalignments(from, to);
    }
  }
}

TEST(copy_kernel_copies_every_type_from_every_address) {
  for (DType dtype : kOthers) {
    try_misalignments(dtype, dtype);
  }
}

TEST(copy_kernel_runs_mixed_lists_on_any_machine) {
  std::mt19937_64 random(5);
  for (const Machine& machine :
       {Machine{.capacity = 1, .wanted = 1, .threads = 32, .seed = 1}, Machine{.capacity = 127, .wanted = 4224},
        Machine{.capacity = 1023, .wanted = 10, .threads = 256, .seed = 3}, Machine{.capacity = 3, .threads = 1},
        Machine{.capacity = 500, .wanted = 100, .threads = 7, .seed = 5}}) {
    for (const bool finite : {true, false}) {
      Job job;
      for (std::size_t i = 0; i < 1100; ++i) {
        const bool cast = random() % 3 != 0;
        const DType from = cast ? kFloats[random() % kFloats.size()] : kOthers[random() % kOthers.size()];
        const DType to = cast ? kFloats[random() % kFloats.size()] : from;
        // Without infinities and NaN but for the last hundred.
        job.add(from, to, random_count(random, from, to), random() % 16, random() % 16, random() % 9 == 0,
                finite || i < 1000, random);
      }
      job.run(finite ? std::optional(0.7) : std::nullopt, true, machine);
    }
  }
}

TEST(copy_kernel_scales_in_place) {
  std::mt19937_64 random(6);
  for (DType dtype : kFloats) {
    for (const double factor : {0.3, 1.0}) {
      for (const bool check : {false, true}) {
        for (std::size_t shift = 0; shift < 16; ++shift) {
          const std::size_t count = random_count(random, dtype, dtype);
          Tensor tensor(count * size_of(dtype), shift * size_of(dtype));
          fill(tensor, dtype, true, random);
          Tensor wanted(tensor.bytes(), 0);
          std::copy_n(tensor.data(), tensor.bytes(), wanted.data());
          const std::vector<CopyItem> items{{tensor.data(), tensor.data(), count, dtype, dtype}};
          Memory memory(items);
          std::int32_t bad = kNone;
          check::run_emulated(items, &factor, check ? &bad : nullptr, {.seed = static_cast<unsigned>(shift)}, memory);
          run_copies_cpu({{wanted.data(), wanted.data(), count, dtype, dtype}}, &factor);
          CHECK(std::memcmp(tensor.data(), wanted.data(), tensor.bytes()) == 0);
          CHECK(tensor.front_intact());
          CHECK_EQ(bad, kNone);
          if (factor == 1 && !check) {
            CHECK(memory.loads.empty());  // nothing to do is nothing done
          }
        }
      }
    }
  }
}

// One bad element in one place, in each place where a loop may end.
TEST(copy_kernel_finds_a_single_nan) {
  const std::size_t chunk = kSmallestChunk / sizeof(float);
  const std::size_t count = 2 * chunk + 9;
  for (const std::size_t shift : {std::size_t{0}, std::size_t{1}}) {
    for (const std::size_t place : {std::size_t{0}, std::size_t{3}, chunk - 1, chunk, count - 2, count - 1}) {
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(), 1e38F, 1.0F}) {
        std::vector<float> values(count + shift, 2.0F);
        values[place + shift] = bad;
        std::vector<std::int64_t> others(count, -1);  // all ones, and no floating point number
        std::vector<float> target(count);
        std::vector<std::int64_t> others_target(count);
        const std::vector<CopyItem> items{
            {nullptr, nullptr, 0, DType::kFloat32, DType::kFloat32},
            {others.data(), others_target.data(), count, DType::kInt64, DType::kInt64},
            {values.data() + shift, target.data(), count, DType::kFloat32, DType::kFloat32}};
        const double factor = 4;
        Memory memory(items);
        std::int32_t found = kNone;
        check::run_emulated(items, &factor, &found, {}, memory);
        CHECK_EQ(found, bad == 1.0F ? kNone : 2);  // 4e38 is beyond float32: seen after the scale
      }
    }
  }
}

TEST(copy_kernel_moves_16_bytes_at_a_time) {
  constexpr std::size_t kCount = 3 * kSmallestChunk;
  struct Case {
    DType from;
    DType to;
    std::size_t source_shift;
    std::size_t target_shift;
    double factor;
    std::uint32_t load;   // width
    std::uint32_t store;  // width
  };
  for (const Case& c :
       {Case{DType::kFloat32, DType::kFloat32, 0, 0, 1, 16, 16},
        Case{DType::kFloat32, DType::kFloat32, 0, 0, 2, 16, 16},
        Case{DType::kFloat32, DType::kFloat32, 3, 3, 2, 16, 16},
        Case{DType::kFloat32, DType::kBFloat16, 0, 0, 2, 16, 8},
        Case{DType::kFloat32, DType::kBFloat16, 2, 2, 1, 16, 8},
        Case{DType::kFloat32, DType::kBFloat16, 2, 6, 1, 16, 8},
        Case{DType::kBFloat16, DType::kFloat32, 0, 0, 1, 8, 16},
        Case{DType::kBFloat16, DType::kBFloat16, 5, 5, 2, 16, 16},
        Case{DType::kBFloat16, DType::kFloat16, 0, 0, 2, 16, 16},
        Case{DType::kBFloat16, DType::kBFloat16, 4, 0, 1, 8, 8}, Case{DType::kFloat64, DType::kFloat32, 1, 1, 1, 16, 8},
        Case{DType::kFloat8E5M2, DType::kFloat32, 4, 0, 1, 4, 16}, Case{DType::kBool, DType::kBool, 7, 7, 1, 16, 16},
        Case{DType::kBool, DType::kBool, 7, 3, 1, 4, 4}, Case{DType::kInt64, DType::kInt64, 1, 0, 1, 8, 8},
        Case{DType::kComplex128, DType::kComplex128, 0, 0, 2, 16, 16}}) {
    const std::size_t from_size = size_of(c.from);
    const std::size_t to_size = size_of(c.to);
    const Tensor source(kCount * from_size, c.source_shift * from_size);
    const Tensor target(kCount * to_size, c.target_shift * to_size);
    const std::vector<CopyItem> items{{source.data(), target.data(), kCount, c.from, c.to}};
    Memory memory(items);
    check::run_emulated(items, &c.factor, nullptr, {}, memory);
    memory.check_complete();
    // All but the ends of each chunk, less than a packet altogether at either end.
    const std::size_t chunks = map_chunks(items, 1, 1).front().chunks;
    const std::size_t bytes = kCount * from_size;
    CHECK(memory.loads[c.load] * c.load + chunks * 2 * c.load > bytes);
    CHECK(memory.stores[c.store] * c.store + chunks * 2 * c.store > kCount * to_size);
    if (c.source_shift == 0 && c.target_shift == 0) {
      CHECK_EQ(memory.loads.size(), 1U);
      CHECK_EQ(memory.stores.size(), 1U);
    }
    const bool small = from_size == 1 && is_floating(c.from);
    CHECK_EQ(memory.most_in_flight, std::size_t{small ? kFloat8InFlight * from_size / c.load : kLoadsInFlight});
  }
}
