// comm/shm/: everything at once: operations of several groups, sizes, memory and ways of issuing, under random delays.
//
// All ranks draw the same program from a seed, and each its own delays and ways from another generator. What a rank
// shows is a function of (sender, receiver, step, index), so every result is known. HPCOMM_STRESS_SEEDS=7-7 picks a
// seed, 1-200 runs many: a test for each, whose name has it.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/reduce_op.h"
#include "native/check.h"
#include "native/shm_job.h"
#include "pack/bfloat16.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

constexpr unsigned kSteps = 120;
// For ranks that share few cores, under a sanitizer.
constexpr milliseconds kTimeout = 60s;

enum class Kind : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kBarrier,
  kMessage,  // send and recv, in the order of their lanes
  kRing,     // sendrecv
  kMail,     // with a tag, beside all lanes
};
constexpr std::array kNames{"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all",
                            "barrier",    "message",        "sendrecv",   "mail"};
constexpr std::array kDTypes{DType::kFloat32, DType::kInt64, DType::kBFloat16};
constexpr std::array kOps{ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin};

// Where buffers lie: on all ranks alike, or as each rank likes.
enum class Where : std::uint8_t { kHeap, kAllocated, kEither };

struct Step {
  unsigned number = 0;
  std::size_t group = 0;
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::size_t count = 0;  // elements, of a part where there are parts
  int from = 0;           // of a message, or the root
  int to = 0;
  std::uint64_t tag = 0;
  bool unique = false;  // no other mail has this tag
  Where where = Where::kHeap;
};

// The world and what overlaps it, in orders of their own: ranks of the world by their place in the group.
std::vector<std::vector<int>> groups_of(int size) {
  std::vector<int> world(static_cast<std::size_t>(size));
  std::vector<int> reversed;  // without rank 0
  for (int r = 0; r < size; ++r) {
    world[static_cast<std::size_t>(r)] = r;
    if (r > 0) {
      reversed.insert(reversed.begin(), r);
    }
  }
  return {world, {0, 1}, {size - 1, 0, 1}, reversed};
}

// Around what decides how bytes travel, and anything else.
std::size_t random_bytes(std::mt19937& random) {
  const auto around = [&random](std::size_t edge) { return edge - 16 + random() % 33; };
  const unsigned kind = random() % 100;
  if (kind < 8) {
    return 0;
  }
  if (kind < 35) {
    return random() % 300;
  }
  if (kind < 55) {
    return around(40);
  }
  if (kind < 75) {
    return around(random() % 2 == 0 ? std::size_t{16} << 10 : std::size_t{32} << 10);
  }
  return kind < 96 ? random() % 120000 : around(std::size_t{1} << 20);
}

Step draw(std::mt19937& random, unsigned number, const std::vector<std::vector<int>>& groups) {
  Step step;
  step.number = number;
  step.group = random() % groups.size();
  step.kind = static_cast<Kind>(random() % kNames.size());
  step.dtype = kDTypes[random() % kDTypes.size()];
  step.op = kOps[random() % kOps.size()];
  const std::size_t ranks = groups[step.group].size();
  std::size_t bytes = random_bytes(random);
  if (step.kind == Kind::kMessage || step.kind == Kind::kMail) {
    bytes <<= bytes > (std::size_t{1} << 19) ? random() % 2 : 0;  // from 2 MB on there are other ways again
  } else if (step.kind == Kind::kReduceScatter || step.kind == Kind::kAllToAll) {
    bytes /= ranks;
  }
  step.count = bytes / size_of(step.dtype);
  step.from = static_cast<int>(random() % ranks);
  step.to = static_cast<int>((static_cast<std::size_t>(step.from) + 1 + random() % (ranks - 1)) % ranks);
  step.unique = random() % 3 == 0;
  step.tag = step.unique ? 1000 + number : random() % 3;
  step.where = static_cast<Where>(random() % 3);
  return step;
}

// Values of a buffer repeat after so many: a prime, so that what lands elsewhere differs.
constexpr std::size_t kPeriod = 509;

// What rank `from` of a group has for its rank `to`. Sums over up to five ranks are exact in every type, and tell which
// ranks are in them.
int value(const Step& step, int from, int to, std::size_t index) {
  const auto number = static_cast<int>(step.number);
  const auto i = static_cast<int>(index);
  if (step.dtype == DType::kBFloat16) {
    return (4 << from) + (i + number + 2 * to) % 4;
  }
  return (1 << (18 + from)) + (to << 15) + ((number % 64) << 9) + i;
}

int reduced(const Step& step, int ranks, int to, std::size_t index) {
  int sum = 0;
  for (int from = 0; from < ranks; ++from) {
    sum += value(step, from, to, index);
  }
  switch (step.op) {
    case ReduceOp::kMax:  // the rank weighs more than all else
      return value(step, ranks - 1, to, index);
    case ReduceOp::kMin:
      return value(step, 0, to, index);
    default:
      return sum;
  }
}

// A period of values, as bytes of the step's type.
using Pattern = std::vector<char>;

template <typename Value>
Pattern pattern(const Step& step, const Value& at) {
  const std::size_t element = size_of(step.dtype);
  Pattern bytes(kPeriod * element);
  for (std::size_t i = 0; i < kPeriod; ++i) {
    const int number = at(i);
    const std::int64_t whole = number;
    const auto real = static_cast<float>(number);
    const BFloat16 half = BFloat16::from(real);
    const void* source = &real;
    if (step.dtype == DType::kInt64) {
      source = &whole;
    } else if (step.dtype == DType::kBFloat16) {
      source = &half;
    }
    std::memcpy(&bytes[i * element], source, element);
  }
  return bytes;
}

Pattern sent(const Step& step, int from, int to) {
  return pattern(step, [&](std::size_t i) { return value(step, from, to, i); });
}

Pattern reduced_by_all(const Step& step, int ranks, int to) {
  return pattern(step, [&](std::size_t i) { return reduced(step, ranks, to, i); });
}

// Calls move(offset, bytes) for each period of `view`: ThreadSanitizer would look at each element that a loop touches.
template <typename Move>
void for_periods(const BufferView& view, const Pattern& values, const Move& move) {
  for (std::size_t done = 0; done < view.bytes; done += values.size()) {
    move(done, std::min(values.size(), view.bytes - done));
  }
}

// Memory of the heap or of allocate(), between bytes that nobody may write to.
class Memory {
 public:
  Memory(Communicator& group, std::size_t bytes, std::size_t offset, bool allocated)
      : begin_(kGuard + offset),
        bytes_(bytes),
        buffer_(allocated ? group.allocate(begin_ + bytes + kGuard)
                          : HeapAllocator().allocate(begin_ + bytes + kGuard)) {
    std::memset(base(), kPoison, begin_ + bytes + kGuard);
  }
  [[nodiscard]] char* data() const { return base() + begin_; }
  [[nodiscard]] bool is_intact() const {
    const auto is_poison = [](char byte) { return byte == kPoison; };
    return std::all_of(base(), data(), is_poison) && std::all_of(data() + bytes_, data() + bytes_ + kGuard, is_poison);
  }
  // It is this rank's again: a peer that still reads it finds nothing that anybody sent.
  void spoil() const { std::memset(data(), kPoison, bytes_); }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr char kPoison = 0x5a;

  [[nodiscard]] char* base() const { return static_cast<char*>(buffer_.view.data); }

  std::size_t begin_;
  std::size_t bytes_;
  Buffer buffer_;
};

// An operation that was issued and is not checked yet.
struct Flight {
  Step step;
  std::shared_ptr<std::vector<Memory>> memory = std::make_shared<std::vector<Memory>>();
  std::vector<std::pair<BufferView, Pattern>> expected;
  WorkPtr work;
  MailPtr mail;  // the same, of a mail from anybody
};

// One rank's part of the program.
class Player {
 public:
  Player(Communicator& world, unsigned seed)
      : seed_(seed),
        own_(seed * 100 + static_cast<unsigned>(world.rank())),
        members_(groups_of(world.size())),
        groups_(members_.size()),
        in_flight_(members_.size()) {
    groups_[0] = {std::shared_ptr<Communicator>(), &world};
    for (std::size_t g = 1; g < members_.size(); ++g) {
      if (std::count(members_[g].begin(), members_[g].end(), world.rank()) > 0) {
        groups_[g] = world.subgroup(members_[g], str("lane", g));
      }
    }
  }

  void play() {
    std::mt19937 common(seed_);
    for (unsigned number = 0; number < kSteps; ++number) {
      const Step step = draw(common, number, members_);
      delay();
      if (groups_[step.group] == nullptr) {
        continue;
      }
      issue(step);
      while (in_flight_[step.group] > own_() % 4) {
        finish_oldest();
      }
    }
    while (!flights_.empty()) {
      finish_oldest();
    }
    if (common() % 2 == 0) {
      groups_[0]->barrier()->wait();  // otherwise ranks leave the subgroups one after the other
    }
  }

 private:
  void delay() {
    const unsigned kind = own_() % 40;
    if (kind < 8) {
      std::this_thread::sleep_for(std::chrono::microseconds(own_() % 200));
    } else if (kind == 8) {
      std::this_thread::sleep_for(1ms);
    }
  }

  // Memory of the flight for `parts` times the step's elements.
  BufferView room(Flight& flight, std::size_t parts) {
    const Step& step = flight.step;
    const std::size_t element = size_of(step.dtype);
    const std::size_t count = step.count * parts;
    const bool allocated = step.where == Where::kAllocated || (step.where == Where::kEither && own_() % 2 == 0);
    const std::size_t offset = own_() % 2 * element;
    flight.memory->emplace_back(*groups_[step.group], count * element, offset, allocated);
    return {flight.memory->back().data(), count * element, count, step.dtype, {}};
  }

  static BufferView part(const Flight& flight, const BufferView& whole, int index) {
    const std::size_t bytes = flight.step.count * size_of(flight.step.dtype);
    char* const begin = static_cast<char*>(whole.data) + static_cast<std::size_t>(index) * bytes;
    return {begin, bytes, flight.step.count, whole.dtype, {}};
  }

  static void put(const BufferView& view, const Pattern& values) {
    for_periods(view, values, [&](std::size_t done, std::size_t bytes) {
      std::memcpy(static_cast<char*>(view.data) + done, values.data(), bytes);
    });
  }

  // What of the step is this rank's.
  void issue(const Step& step) {
    Communicator& group = *groups_[step.group];
    const int self = group.rank();
    const bool is_message = step.kind == Kind::kMessage || step.kind == Kind::kMail;
    if (is_message && self != step.from && self != step.to) {
      return;
    }
    Flight flight;
    flight.step = step;
    OpOptions options;
    options.keepalive = flight.memory;
    options.inline_when_idle = own_() % 2 == 0;
    if (is_message) {
      issue_message(flight, group, options);
    } else {
      issue_collective(flight, group, options);
    }
    ++in_flight_[step.group];
    flights_.push_back(std::move(flight));
  }

  void issue_message(Flight& flight, Communicator& group, const OpOptions& options) {
    const Step& step = flight.step;
    const bool sends = group.rank() == step.from;
    const BufferView data = room(flight, 1);
    if (sends) {
      put(data, sent(step, step.from, step.to));
    }
    flight.expected.emplace_back(data, sent(step, step.from, step.to));  // a sender's as well: nobody writes there
    MailOptions of_mail;
    of_mail.keepalive = options.keepalive;
    if (step.kind == Kind::kMessage) {
      flight.work = sends ? group.send(data, step.to, options) : group.recv(data, step.from, options);
    } else if (sends) {
      flight.work = group.mailbox()->send(data, step.to, step.tag, of_mail);
    } else if (step.unique && own_() % 2 == 0) {
      flight.work = flight.mail = group.mailbox()->recv(data, Mailbox::kAnySource, step.tag, of_mail);
    } else {
      flight.work = group.mailbox()->recv(data, step.from, step.tag, of_mail);
    }
  }

  void issue_collective(Flight& flight, Communicator& group, const OpOptions& options) {
    const Step& step = flight.step;
    const int ranks = group.size();
    const int self = group.rank();
    const auto parts = static_cast<std::size_t>(ranks);
    const bool in_place = own_() % 4 == 0;
    switch (step.kind) {
      case Kind::kAllReduce: {
        const BufferView data = room(flight, 1);
        put(data, sent(step, self, 0));
        flight.expected.emplace_back(data, reduced_by_all(step, ranks, 0));
        flight.work = group.all_reduce(data, step.op, options);
        return;
      }
      case Kind::kReduceScatter: {
        const BufferView input = room(flight, parts);
        for (int to = 0; to < ranks; ++to) {
          put(part(flight, input, to), sent(step, self, to));
        }
        const BufferView output = in_place ? part(flight, input, self) : room(flight, 1);
        flight.expected.emplace_back(output, reduced_by_all(step, ranks, self));
        flight.work = group.reduce_scatter(output, input, step.op, options);
        return;
      }
      case Kind::kAllGather: {
        const BufferView output = room(flight, parts);
        const BufferView input = in_place ? part(flight, output, self) : room(flight, 1);
        put(input, sent(step, self, 0));
        for (int from = 0; from < ranks; ++from) {
          flight.expected.emplace_back(part(flight, output, from), sent(step, from, 0));
        }
        flight.work = group.all_gather(output, input, options);
        return;
      }
      case Kind::kBroadcast: {
        const BufferView data = room(flight, 1);
        if (self == step.from) {
          put(data, sent(step, self, 0));
        }
        flight.expected.emplace_back(data, sent(step, step.from, 0));
        flight.work = group.broadcast(data, step.from, options);
        return;
      }
      case Kind::kAllToAll: {
        const BufferView input = room(flight, parts);
        const BufferView output = in_place ? input : room(flight, parts);
        for (int peer = 0; peer < ranks; ++peer) {
          put(part(flight, input, peer), sent(step, self, peer));
          flight.expected.emplace_back(part(flight, output, peer), sent(step, peer, self));
        }
        flight.work = group.all_to_all(output, input, options);
        return;
      }
      case Kind::kRing: {
        const int next = (self + 1) % ranks;
        const int previous = (self + ranks - 1) % ranks;
        const BufferView out = room(flight, 1);
        const BufferView in = room(flight, 1);
        put(out, sent(step, self, next));
        flight.expected.emplace_back(out, sent(step, self, next));
        flight.expected.emplace_back(in, sent(step, previous, self));
        flight.work = group.sendrecv(out, next, in, previous, options);
        return;
      }
      case Kind::kBarrier:
      case Kind::kMessage:
      case Kind::kMail:
        flight.work = group.barrier(options);
        return;
    }
  }

  // In the order in which they were issued, which is that of all ranks: of what is not over, all members have issued
  // the first, or wait for something before it.
  void finish_oldest() {
    Flight flight = std::move(flights_.front());
    flights_.pop_front();
    --in_flight_[flight.step.group];
    flight.work->wait();
    for (const auto& [view, values] : flight.expected) {
      const auto* const got = static_cast<const char*>(view.data);
      std::size_t wrong = 0;  // periods
      std::size_t first = 0;
      for_periods(view, values, [&](std::size_t done, std::size_t bytes) {
        if (std::memcmp(got + done, values.data(), bytes) != 0) {
          first = wrong++ == 0 ? done : first;
        }
      });
      if (wrong > 0) {
        const auto* const differs = std::mismatch(values.begin(), values.end(), got + first).second;
        complain(flight.step, str("byte ", differs - got, " of ", view.bytes, " is wrong, and ", wrong, " periods of ",
                                  values.size(), " bytes"));
      }
    }
    for (const Memory& memory : *flight.memory) {
      if (!memory.is_intact()) {
        complain(flight.step, "something was written beside a buffer");
      }
      memory.spoil();
    }
    if (flight.mail != nullptr && flight.mail->source() != flight.step.from) {
      complain(flight.step, str("it says that it came from rank ", flight.mail->source()));
    }
  }

  void complain(const Step& step, const std::string& what) const {
    check::fail(__FILE__, __LINE__,
                str("seed ", seed_, ", rank ", groups_[0]->rank(), ", step ", step.number, ": ",
                    kNames[static_cast<std::size_t>(step.kind)], " of ", step.count, " ", to_string(step.dtype),
                    " in group ", step.group, ", from ", step.from, " to ", step.to, ": ", what));
  }

  const unsigned seed_;
  std::mt19937 own_;
  const std::vector<std::vector<int>> members_;
  std::vector<std::shared_ptr<Communicator>> groups_;  // the world first; null where this rank is no member
  std::deque<Flight> flights_;
  std::vector<unsigned> in_flight_;  // by group
};

void stress(unsigned seed) {
  const int size = 3 + static_cast<int>((seed + seed / 3) % 3);
  ShmJob(size, kTimeout, kAttaches[seed % kAttaches.size()]).run([seed](Communicator& world) {
    try {
      Player(world, seed).play();
    } catch (const std::exception& error) {
      check::fail(__FILE__, __LINE__, str("seed ", seed, ", rank ", world.rank(), ": ", error.what()));
      throw;
    }
  });
}

// A test of its own for each seed: the limit of a test is that of one, and what hangs is named with it.
bool register_seeds() {
  const char* const text = std::getenv("HPCOMM_STRESS_SEEDS");
  unsigned first = 1;
  unsigned last = 3;
  char rest = 0;
  if (text != nullptr && std::sscanf(text, "%u-%u%c", &first, &last, &rest) != 2) {
    const auto complain = [] { check::fail(__FILE__, __LINE__, "HPCOMM_STRESS_SEEDS: expected FIRST-LAST"); };
    (void)check::Registration("shm_stress_of_everything", __FILE__, complain);
    return false;
  }
  for (unsigned seed = first; seed <= last; ++seed) {
    const std::string name = "shm_stress_of_everything_" + std::to_string(seed);
    (void)check::Registration(name.c_str(), __FILE__, [seed] { stress(seed); });
  }
  return true;
}

[[maybe_unused]] const bool registered = register_seeds();

}  // namespace
