// The pack kernel for CPUs: a list of copies, each by the loop for its types, large ones past the caches.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "pack/convert.h"
#include "pack/isa.h"
#include "pack/pack.h"
#include "pack/reduce_kernels.h"

namespace hpcomm {

namespace {

Isa isa_of_this_cpu() {
  static const Isa isa = detect_isa();
  return isa;
}

// What other cores read goes past the caches of this one from here on. It saves the fetch of each line that is about to
// be overwritten, and the detour of each line through the cache of the core that wrote it. Kept by trial,
// with two ranks that pack and then reduce 1 to 64 MB.
constexpr std::size_t kStream = std::size_t{16} << 10;

// Converted within the first-level cache, then copied past it.
void stream_converted(Isa isa, convert::Run run, const CopyItem& item, double scale) {
  alignas(64) std::array<unsigned char, 4096> block;
  const std::size_t source_size = size_of(item.source_dtype);
  const std::size_t target_size = size_of(item.target_dtype);
  const std::size_t per_block = block.size() / target_size;
  CopyItem piece = item;
  piece.target = block.data();
  for (std::size_t done = 0; done < item.count; done += per_block) {
    piece.source = static_cast<const char*>(item.source) + done * source_size;
    piece.count = std::min(per_block, item.count - done);
    (void)run(&piece, 1, convert::kAnySize, scale, convert::Fetching::kSources);
    kernels::stream_copy(isa, static_cast<char*>(item.target) + done * target_size, block.data(),
                         piece.count * target_size);
  }
}

// Goes through a list of items; what is done to a pair of types is looked up when they change.
class Copier {
 public:
  Copier(Isa isa, double scale, convert::Fetching fetching) : isa_(isa), scale_(scale), fetching_(fetching) {}

  // Copies some of them, from the first one on, and returns how many. Stores past the caches need
  // kernels::stream_fence() at the end.
  std::size_t copy(const CopyItem* items, std::size_t count) {
    const CopyItem& first = *items;
    if (first.source == nullptr) {
      clear(first);
      return 1;
    }
    set(first);
    if (first.reader == Reader::kThisCore) {
      return run_(items, count, convert::kAnySize, scale_, fetching_);
    }
    if (goes_past_caches(first)) {
      stream(first);
      return 1;
    }
    // A large one that is its own target stays where it is.
    return first.count < most_ ? run_(items, count, most_, scale_, fetching_)
                               : run_(items, 1, convert::kAnySize, scale_, fetching_);
  }

  // The same of one item, and whether its source had a bad value. Two passes over a piece that stays in the first-level
  // cache: the loops without a check stay as they are, and there is one checking loop for each source instead of one
  // for each pair.
  bool checked_copy(const CopyItem& item) {
    constexpr std::size_t kPiece = 2048;  // elements
    const convert::Check check =
        item.source == nullptr ? nullptr : convert::find_check(isa_, item.source_dtype, item.target_dtype);
    if (check == nullptr) {
      copy(&item, 1);
      return false;
    }
    set(item);
    const bool streams = goes_past_caches(item);
    bool bad = false;
    for (std::size_t done = 0; done < item.count; done += kPiece) {
      CopyItem piece = item;
      piece.source = static_cast<const char*>(item.source) + done * size_of(item.source_dtype);
      piece.target = static_cast<char*>(item.target) + done * size_of(item.target_dtype);
      piece.count = std::min(kPiece, item.count - done);
      bad = check(piece.source, piece.count, scale_) || bad;  // first: scaling may be in place
      if (streams) {
        stream(piece);
      } else {
        (void)run_(&piece, 1, convert::kAnySize, scale_, fetching_);
      }
    }
    return bad;
  }

 private:
  void set(const CopyItem& item) {
    if (run_ != nullptr && item.source_dtype == source_dtype_ && item.target_dtype == target_dtype_) {
      return;
    }
    source_dtype_ = item.source_dtype;
    target_dtype_ = item.target_dtype;
    most_ = kStream / size_of(target_dtype_);
    converts_ = source_dtype_ != target_dtype_ || (scale_ != 1.0 && is_floating(source_dtype_));
    run_ = converts_ ? convert::find_run(isa_, source_dtype_, target_dtype_) : convert::bytes_run(isa_);
    HPCOMM_ASSERT(run_ != nullptr, "scale of ", to_string(source_dtype_));
  }

  [[nodiscard]] bool goes_past_caches(const CopyItem& item) const {
    return item.reader == Reader::kOthers && item.source != item.target && item.count >= most_;
  }

  void stream(const CopyItem& item) const {
    if (converts_) {
      stream_converted(isa_, run_, item, scale_);
    } else {
      kernels::stream_copy(isa_, item.target, item.source, item.count * size_of(target_dtype_));
    }
  }

  static void clear(const CopyItem& item) {
    if (item.count > 0) {  // memset must not see null, not even for nothing
      std::memset(item.target, 0, item.count * size_of(item.target_dtype));
    }
  }

  const Isa isa_;
  const double scale_;
  const convert::Fetching fetching_;
  DType source_dtype_{};
  DType target_dtype_{};
  std::size_t most_ = 0;  // elements from which an item goes past the caches, if others read it
  bool converts_ = false;
  convert::Run run_ = nullptr;
};

}  // namespace

bool can_convert(DType from, DType to) noexcept {
  return from == to || convert::find_run(isa_of_this_cpu(), from, to) != nullptr;
}

bool can_scale(DType dtype) noexcept { return convert::find_run(isa_of_this_cpu(), dtype, dtype) != nullptr; }

void convert::run_copies(Isa isa, const std::vector<CopyItem>& items, const double* factor, std::int32_t* first_bad) {
  const double scale = factor == nullptr ? 1.0 : *factor;
  Copier copier(isa, scale, fetching_of(items.data(), items.size(), runs_on_intel()));
  // Later tensors than the first bad one do not matter.
  const std::size_t unchecked = first_bad == nullptr ? 0 : static_cast<std::size_t>(std::max(*first_bad, 0));
  std::size_t next = 0;
  for (; next < std::min(unchecked, items.size()); ++next) {
    if (copier.checked_copy(items[next])) {
      *first_bad = static_cast<std::int32_t>(next++);
      break;
    }
  }
  while (next < items.size()) {
    next += copier.copy(&items[next], items.size() - next);
  }
  kernels::stream_fence();
}

void run_copies_cpu(const std::vector<CopyItem>& items, const double* factor, std::int32_t* first_bad) {
  convert::run_copies(isa_of_this_cpu(), items, factor, first_bad);
}

}  // namespace hpcomm
