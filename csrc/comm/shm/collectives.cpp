// The algorithms. Reading order: open() and finish(), then one operation after the other.
#include "comm/shm/collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "pack/reduce.h"

namespace hpcomm::shm {

namespace {

// Contributions up to here travel in the first step; above, where they lie may travel instead.
constexpr std::size_t kSmall = std::size_t{32} << 10;
// An all-reduce of more than two ranks reads all contributions directly up to here, and in slices above.
constexpr std::size_t kDirect = std::size_t{16} << 10;
// Results are spread over several buffers in blocks that stay in the first-level cache beside what they come from.
constexpr std::size_t kBlock = std::size_t{4} << 10;

// A run of elements.
struct Range {
  std::size_t begin = 0;
  std::size_t count = 0;
};

// Part `index` of `parts` of `count` elements, on cache line boundaries where there are enough elements.
Range slice(std::size_t count, std::size_t parts, std::size_t index, std::size_t element_bytes) {
  const std::size_t grain = std::max<std::size_t>(1, 64 / element_bytes);
  const std::size_t lines = (count + grain - 1) / grain;
  const std::size_t each = (lines + parts - 1) / parts * grain;
  const std::size_t begin = std::min(count, each * index);
  return {begin, std::min(count - begin, each)};
}

const char* at(const void* data, std::size_t bytes) { return static_cast<const char*>(data) + bytes; }
char* at(void* data, std::size_t bytes) { return static_cast<char*>(data) + bytes; }

void copy(void* to, const void* from, std::size_t bytes, std::size_t whole) {
  if (bytes == 0 || to == from) {
    return;
  }
  if (whole >= kStream) {
    stream_copy(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

Collectives::Collectives(std::shared_ptr<Region> region, std::size_t rank, std::shared_ptr<Neighbourhood> neighbourhood,
                         std::vector<int> members)
    : steps_(std::move(region), rank, neighbourhood->wait_policy()),
      neighbourhood_(std::move(neighbourhood)),
      members_(std::move(members)),
      sources_(members_.size()) {}

Collectives::Shown Collectives::open(Descriptor descriptor, const void* data, std::size_t bytes, Shows shows,
                                     const Patience& patience) {
  Shown shown = Shown::kNothing;
  steps_.begin(patience);
  Line& line = steps_.own_line();
  if (bytes <= std::min(kSmall, steps_.slot_bytes())) {
    shown = Shown::kPayload;
    if (shows != Shows::kNothing && bytes > 0) {
      std::memcpy(bytes <= kInlineBytes ? line.payload : steps_.own_slot(), data, bytes);
    }
  } else if (shows == Shows::kPlaces) {
    if (const auto location = neighbourhood_->arena().locate(data, bytes)) {
      shown = Shown::kLocation;
      line.location = *location;
    }
  }
  descriptor.located = shown == Shown::kLocation ? 1 : 0;
  line.descriptor = descriptor;
  steps_.publish();
  steps_.await_all(patience);
  require_agreement(descriptor);
  return shown;
}

void Collectives::require_agreement(const Descriptor& own) const {
  for (std::size_t r = 0; r < steps_.ranks(); ++r) {
    if (!steps_.line(r).descriptor.agrees(own)) {
      Disagreement all;
      for (std::size_t i = 0; i < steps_.ranks(); ++i) {
        all.descriptors.push_back(steps_.line(i).descriptor);
      }
      throw all;
    }
  }
}

bool Collectives::all_located() const {
  for (std::size_t r = 0; r < steps_.ranks(); ++r) {
    if (steps_.line(r).descriptor.located == 0) {
      return false;
    }
  }
  return true;
}

std::vector<char*> Collectives::map_all(const void* own, std::size_t bytes, const Patience& patience) {
  std::vector<char*> buffers(steps_.ranks());
  for (std::size_t r = 0; r < steps_.ranks(); ++r) {
    require_present(r);
    buffers[r] = r == steps_.rank() ? const_cast<char*>(static_cast<const char*>(own)) : map(r, bytes, patience);
  }
  return buffers;
}

char* Collectives::map(std::size_t rank, std::size_t bytes, const Patience& patience) {
  return neighbourhood_->map(members_[rank], steps_.line(rank).location, bytes, steps_.with(rank, patience));
}

void Collectives::require_present(std::size_t rank) const {
  if (rank != steps_.rank() && steps_.gone(rank) == Gone::kGivenUp) {
    throw Error(ErrorKind::kPeerError, str("rank ", members_[rank], " ", to_string(Gone::kGivenUp)),
                {members_[steps_.rank()], members_[rank], -1, ""});
  }
}

void Collectives::finish(const Patience& patience) {
  steps_.begin(patience);
  steps_.publish();
  steps_.await_all(patience);
}

const char* Collectives::shown(std::size_t rank, std::size_t bytes) const noexcept {
  return bytes <= kInlineBytes ? steps_.line(rank).payload : steps_.slot(rank);
}

// --- all_reduce ------------------------------------------------------------------------------------------------------

void Collectives::all_reduce(Descriptor descriptor, const BufferView& buffer, ReduceOp op, const Patience& patience) {
  const Shown mine = open(descriptor, buffer.data, buffer.bytes, Shows::kPlaces, patience);
  HPCOMM_REQUIRE(can_reduce(buffer.dtype, op), "all_reduce: no ", to_string(op), " of ", to_string(buffer.dtype));
  if (buffer.bytes == 0) {
    return;
  }
  const std::size_t ranks = steps_.ranks();
  if (mine != Shown::kPayload) {
    if (all_located()) {
      all_reduce_in_place(buffer, op, patience);
    } else if (ranks <= 2) {
      all_reduce_direct(buffer, op, patience);
    } else {
      all_reduce_sliced(buffer, op, patience);
    }
  } else if (ranks <= 2 || buffer.bytes <= kDirect) {
    for (std::size_t r = 0; r < ranks; ++r) {
      sources_[r] = r == steps_.rank() ? buffer.data : shown(r, buffer.bytes);
    }
    reduce_cpu(buffer.data, sources_, buffer.count, buffer.dtype, op);
  } else {
    // Everything is in the slots already: each rank forms one slice and shows it.
    const std::size_t element = size_of(buffer.dtype);
    const Range own = slice(buffer.count, ranks, steps_.rank(), element);
    for (std::size_t r = 0; r < ranks; ++r) {
      sources_[r] = at(r == steps_.rank() ? buffer.data : steps_.slot(r), own.begin * element);
    }
    // Begun before the slots are read for the last time, published after.
    steps_.begin(patience);
    char* result = steps_.own_slot();
    reduce_cpu(result, sources_, own.count, buffer.dtype, op);
    steps_.publish();
    std::memcpy(at(buffer.data, own.begin * element), result, own.count * element);
    for (std::size_t i = 1; i < ranks; ++i) {
      const std::size_t r = (steps_.rank() + i) % ranks;
      const Range theirs = slice(buffer.count, ranks, r, element);
      steps_.await(r, patience);
      std::memcpy(at(buffer.data, theirs.begin * element), steps_.slot(r), theirs.count * element);
    }
  }
}

// Two ranks: each reads the other's piece and forms the whole sum. As much memory traffic as slices need, in half as
// many steps.
void Collectives::all_reduce_direct(const BufferView& buffer, ReduceOp op, const Patience& patience) {
  const std::size_t element = size_of(buffer.dtype);
  const std::size_t piece = steps_.slot_bytes() / element;
  for (std::size_t begin = 0; begin < buffer.count; begin += piece) {
    const std::size_t count = std::min(piece, buffer.count - begin);
    char* own = at(buffer.data, begin * element);
    steps_.begin(patience);
    to_slot_.copy(steps_.own_slot(), own, count * element);
    steps_.publish();
    steps_.await_all(patience);
    for (std::size_t r = 0; r < steps_.ranks(); ++r) {
      sources_[r] = r == steps_.rank() ? own : steps_.slot(r);
    }
    reduce_cpu(own, sources_, count, buffer.dtype, op);
  }
}

// Reduce-scatter and all-gather of each piece while it is in cache (R. Rabenseifner, "Optimization of Collective
// Reduction Operations", ICCS 2004, with direct reads in place of the exchange by halves).
void Collectives::all_reduce_sliced(const BufferView& buffer, ReduceOp op, const Patience& patience) {
  const std::size_t element = size_of(buffer.dtype);
  const std::size_t ranks = steps_.ranks();
  const std::size_t self = steps_.rank();
  // A slot holds the slices of the others; a multiple of whole cache lines for every rank.
  const std::size_t grain = std::max<std::size_t>(1, 64 / element);
  const std::size_t each = steps_.slot_bytes() / element / (ranks - 1) / grain * grain;
  const std::size_t piece = each * ranks;
  const auto place = [each, element](std::size_t owner, std::size_t reader) {
    return (reader < owner ? reader : reader - 1) * each * element;
  };
  for (std::size_t begin = 0; begin < buffer.count; begin += piece) {
    const std::size_t count = std::min(piece, buffer.count - begin);
    char* data = at(buffer.data, begin * element);
    const auto range = [count, each](std::size_t r) {
      const std::size_t first = std::min(count, each * r);
      return Range{first, std::min(each, count - first)};
    };
    steps_.begin(patience);
    for (std::size_t r = 0; r < ranks; ++r) {
      if (r != self && range(r).count > 0) {
        to_slot_.copy(steps_.own_slot() + place(self, r), at(data, range(r).begin * element), range(r).count * element);
      }
    }
    steps_.publish();
    const Range own = range(self);
    for (std::size_t r = 0; r < ranks; ++r) {
      steps_.await(r, patience);
      sources_[r] = r == self ? at(data, own.begin * element) : steps_.slot(r) + place(r, self);
    }
    steps_.begin(patience);
    if (own.count > 0) {
      char* const sum = at(data, own.begin * element);  // one of the sources
      reduce_cpu(sum, sources_, own.count, buffer.dtype, op);
      to_slot_.copy(steps_.own_slot(), sum, own.count * element);
    }
    steps_.publish();
    for (std::size_t i = 1; i < ranks; ++i) {
      const std::size_t r = (self + i) % ranks;
      steps_.await(r, patience);
      if (range(r).count > 0) {
        std::memcpy(at(data, range(r).begin * element), steps_.slot(r), range(r).count * element);
      }
    }
  }
}

// Each rank forms one slice from all buffers and writes it into all of them: every byte is read once and written once.
void Collectives::all_reduce_in_place(const BufferView& buffer, ReduceOp op, const Patience& patience) {
  const std::size_t element = size_of(buffer.dtype);
  const std::vector<char*> buffers = map_all(buffer.data, buffer.bytes, patience);
  const Range own = slice(buffer.count, steps_.ranks(), steps_.rank(), element);
  std::vector<void*> targets(steps_.ranks());
  const std::size_t block = kBlock / element;
  for (std::size_t done = 0; done < own.count; done += block) {
    const std::size_t count = std::min(block, own.count - done);
    for (std::size_t r = 0; r < steps_.ranks(); ++r) {
      targets[r] = buffers[r] + (own.begin + done) * element;
      sources_[r] = targets[r];
    }
    void* own_target = targets[steps_.rank()];
    reduce_cpu(own_target, sources_, count, buffer.dtype, op);
    for (void* target : targets) {
      if (target != own_target) {
        std::memcpy(target, own_target, count * element);
      }
    }
  }
  finish(patience);
}

// --- all_gather, broadcast, barrier ----------------------------------------------------------------------------------

void Collectives::all_gather(Descriptor descriptor, const BufferView& output, const BufferView& input,
                             const Patience& patience) {
  const Shown mine = open(descriptor, input.data, input.bytes, Shows::kPlaces, patience);
  const std::size_t ranks = steps_.ranks();
  const std::size_t self = steps_.rank();
  if (input.bytes == 0) {
    return;
  }
  const auto part = [&](std::size_t r) { return at(output.data, r * input.bytes); };
  if (mine == Shown::kPayload) {
    for (std::size_t r = 0; r < ranks; ++r) {
      std::memcpy(part(r), shown(r, input.bytes), input.bytes);
    }
    return;
  }
  if (all_located()) {
    const std::vector<char*> buffers = map_all(input.data, input.bytes, patience);
    for (std::size_t i = 0; i < ranks; ++i) {
      const std::size_t r = (self + i) % ranks;
      copy(part(r), buffers[r], input.bytes, output.bytes);
    }
    finish(patience);
    return;
  }
  copy(part(self), input.data, input.bytes, output.bytes);
  const std::size_t piece = steps_.slot_bytes();
  for (std::size_t begin = 0; begin < input.bytes; begin += piece) {
    const std::size_t bytes = std::min(piece, input.bytes - begin);
    steps_.begin(patience);
    to_slot_.copy(steps_.own_slot(), at(input.data, begin), bytes);
    steps_.publish();
    for (std::size_t i = 1; i < ranks; ++i) {
      const std::size_t r = (self + i) % ranks;
      steps_.await(r, patience);
      copy(part(r) + begin, steps_.slot(r), bytes, output.bytes);
    }
  }
}

void Collectives::broadcast(Descriptor descriptor, const BufferView& buffer, std::size_t root,
                            const Patience& patience) {
  const bool sends = steps_.rank() == root;
  (void)open(descriptor, buffer.data, buffer.bytes, sends ? Shows::kPlaces : Shows::kNothing, patience);
  if (buffer.bytes == 0) {
    return;
  }
  if (buffer.bytes <= std::min(kSmall, steps_.slot_bytes())) {
    if (!sends) {
      std::memcpy(buffer.data, shown(root, buffer.bytes), buffer.bytes);
    }
    return;
  }
  if (steps_.line(root).descriptor.located != 0) {
    if (!sends) {
      require_present(root);
      const char* source = map(root, buffer.bytes, patience);
      copy(buffer.data, source, buffer.bytes, buffer.bytes);
    }
    finish(patience);
    return;
  }
  // Pieces small enough that the readers of one overlap the writer of the next.
  const std::size_t eighth = (buffer.bytes / 8 + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::size_t piece = std::clamp(eighth, std::min(kSmall, steps_.slot_bytes()), steps_.slot_bytes());
  for (std::size_t begin = 0; begin < buffer.bytes; begin += piece) {
    const std::size_t bytes = std::min(piece, buffer.bytes - begin);
    steps_.begin(patience);
    if (sends) {
      to_slot_.copy(steps_.own_slot(), at(buffer.data, begin), bytes);
      steps_.publish();
    } else {
      steps_.publish();
      steps_.await(root, patience);
      copy(at(buffer.data, begin), steps_.slot(root), bytes, buffer.bytes);
    }
  }
}

void Collectives::barrier(Descriptor descriptor, const Patience& patience) {
  (void)open(descriptor, nullptr, 0, Shows::kNothing, patience);
}

// --- reduce_scatter, all_to_all --------------------------------------------------------------------------------------

template <typename Take>
void Collectives::exchange_parts(const BufferView& input, const Patience& patience, const Take& take) {
  const std::size_t ranks = steps_.ranks();
  const std::size_t self = steps_.rank();
  const std::size_t element = size_of(input.dtype);
  const std::size_t part = input.count / ranks;
  const std::size_t grain = std::max<std::size_t>(1, 64 / element);
  const std::size_t piece = steps_.slot_bytes() / element / std::max<std::size_t>(1, ranks - 1) / grain * grain;
  const auto place = [piece, element](std::size_t owner, std::size_t reader) {
    return (reader < owner ? reader : reader - 1) * piece * element;
  };
  for (std::size_t begin = 0; begin < part; begin += piece) {
    const std::size_t count = std::min(piece, part - begin);
    steps_.begin(patience);
    for (std::size_t r = 0; r < ranks; ++r) {
      if (r != self) {
        to_slot_.copy(steps_.own_slot() + place(self, r), at(input.data, (r * part + begin) * element),
                      count * element);
      }
    }
    steps_.publish();
    for (std::size_t i = 1; i <= ranks; ++i) {
      const std::size_t r = (self + i) % ranks;
      steps_.await(r, patience);
      sources_[r] = r == self ? at(input.data, (self * part + begin) * element) : steps_.slot(r) + place(r, self);
    }
    take(Range{begin, count});
  }
}

void Collectives::reduce_scatter(Descriptor descriptor, const BufferView& output, const BufferView& input, ReduceOp op,
                                 const Patience& patience) {
  const Shown mine = open(descriptor, input.data, input.bytes, Shows::kPlaces, patience);
  HPCOMM_REQUIRE(can_reduce(input.dtype, op), "reduce_scatter: no ", to_string(op), " of ", to_string(input.dtype));
  if (input.bytes == 0) {
    return;
  }
  const std::size_t own = steps_.rank() * output.bytes;
  if (mine == Shown::kPayload) {
    for (std::size_t r = 0; r < steps_.ranks(); ++r) {
      sources_[r] = at(r == steps_.rank() ? static_cast<const void*>(input.data) : shown(r, input.bytes), own);
    }
    reduce_cpu(output.data, sources_, output.count, output.dtype, op);
  } else if (all_located()) {
    const std::vector<char*> buffers = map_all(input.data, input.bytes, patience);
    for (std::size_t r = 0; r < steps_.ranks(); ++r) {
      sources_[r] = buffers[r] + own;
    }
    reduce_cpu(output.data, sources_, output.count, output.dtype, op);
    finish(patience);
  } else {
    const std::size_t element = size_of(input.dtype);
    exchange_parts(input, patience, [&](Range range) {
      reduce_cpu(at(output.data, range.begin * element), sources_, range.count, output.dtype, op);
    });
  }
}

void Collectives::all_to_all(Descriptor descriptor, const BufferView& output, const BufferView& input,
                             const Patience& patience) {
  // In place, a rank's own parts are overwritten by what comes while others still read them where they lie.
  const Shows shows = input.data == output.data ? Shows::kCopies : Shows::kPlaces;
  const Shown mine = open(descriptor, input.data, input.bytes, shows, patience);
  if (input.bytes == 0) {
    return;
  }
  const std::size_t ranks = steps_.ranks();
  const std::size_t part = input.bytes / ranks;
  const std::size_t own = steps_.rank() * part;
  if (mine == Shown::kPayload) {
    for (std::size_t r = 0; r < ranks; ++r) {
      std::memcpy(at(output.data, r * part), shown(r, input.bytes) + own, part);
    }
  } else if (all_located()) {
    const std::vector<char*> buffers = map_all(input.data, input.bytes, patience);
    for (std::size_t i = 0; i < ranks; ++i) {
      const std::size_t r = (steps_.rank() + i) % ranks;
      copy(at(output.data, r * part), buffers[r] + own, part, output.bytes);
    }
    finish(patience);
  } else {
    const std::size_t element = size_of(input.dtype);
    exchange_parts(input, patience, [&](Range range) {
      for (std::size_t r = 0; r < ranks; ++r) {
        copy(at(output.data, r * part + range.begin * element), sources_[r], range.count * element, output.bytes);
      }
    });
  }
}

}  // namespace hpcomm::shm
