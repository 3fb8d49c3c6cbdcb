// comm/shm/: a rank that does not hand over its memory for a while, as one that was stopped and goes on.
#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "native/check.h"
#include "native/patience.h"
#include "native/shm_job.h"
#include "native/shm_letters.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kLarge = 300000;  // a message of so many numbers is copied where it lies

// The addresses of this process's couriers, which are those of all ranks.
std::set<std::string> couriers() {
  std::set<std::string> addresses;
  DIR* const files = ::opendir("/proc/self/fd");
  CHECK(files != nullptr);
  while (const dirent* file = ::readdir(files)) {
    sockaddr_un address{};
    socklen_t length = sizeof address;
    if (::getsockname(std::atoi(file->d_name), reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
        address.sun_family != AF_UNIX || length <= offsetof(sockaddr_un, sun_path)) {
      continue;
    }
    const std::string name(address.sun_path, length - offsetof(sockaddr_un, sun_path));
    if (name.rfind(std::string(1, '\0') + "hpcomm-", 0) == 0) {
      addresses.insert(name);
    }
  }
  ::closedir(files);
  return addresses;
}

// While it lives, all couriers listen to peers that say nothing, up to half a second to each, and hand over nothing.
class Stall {
 public:
  Stall() {
    constexpr int kPeers = 40;
    for (const std::string& name : couriers()) {
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::memcpy(address.sun_path, name.data(), name.size());
      const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
      for (int i = 0; i < kPeers; ++i) {
        peers_.push_back(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
        CHECK_EQ(::connect(peers_.back(), reinterpret_cast<const sockaddr*>(&address), length), 0);
      }
    }
    CHECK(!peers_.empty());
  }
  ~Stall() {
    for (const int peer : peers_) {
      ::close(peer);
    }
  }
  Stall(const Stall&) = delete;
  Stall& operator=(const Stall&) = delete;
  Stall(Stall&& other) noexcept : peers_(std::move(other.peers_)) { other.peers_.clear(); }
  Stall& operator=(Stall&&) = delete;

 private:
  std::vector<int> peers_;
};

// All ranks call it; when it returns nobody hands over anything, until rank 0 lets go of it.
std::optional<Stall> stall_by_rank_0(Communicator& world) {
  std::optional<Stall> stall;
  if (world.rank() == 0) {
    stall.emplace();
  }
  world.barrier()->wait();
  return stall;
}

OpOptions within(milliseconds timeout) {
  OpOptions options;
  options.timeout = timeout;
  return options;
}

// Numbers in memory that peers can map.
struct Shared {
  explicit Shared(Communicator& world, const std::vector<std::int64_t>& values)
      : memory(world.allocate(values.size() * sizeof(std::int64_t))), view(memory.view) {
    std::memcpy(view.data, values.data(), view.bytes);
    view.count = values.size();
    view.dtype = DType::kInt64;
  }
  [[nodiscard]] std::vector<std::int64_t> values() const {
    const auto* first = static_cast<const std::int64_t*>(view.data);
    return {first, first + view.count};
  }

  Buffer memory;
  BufferView view;
};

}  // namespace

TEST(shm_collectives_wait_for_the_memory_of_a_stopped_rank) {
  ShmJob(3).run([](Communicator& world) {
    const Shared mine(world, letter(world.rank(), 1, kLarge));
    std::optional<Stall> stall = stall_by_rank_0(world);
    const WorkPtr sum = world.all_reduce(mine.view, ReduceOp::kSum);
    if (stall) {
      std::this_thread::sleep_for(300ms);
      CHECK(!sum->done());
      stall.reset();
    }
    sum->wait();
    std::vector<std::int64_t> expected(kLarge, 0);
    for (int r = 0; r < world.size(); ++r) {
      const std::vector<std::int64_t> other = letter(r, 1, kLarge);
      for (std::size_t i = 0; i < kLarge; ++i) {
        expected[i] += other[i];
      }
    }
    CHECK(mine.values() == expected);
  });
}

TEST(shm_collectives_name_the_rank_that_does_not_hand_over_its_memory) {
  const ShmJob job(2);
  run_ranks(2, [&job](int rank) {
    const auto world = job.communicator(rank);
    const Shared mine(*world, letter(rank, 1, kLarge));
    const std::optional<Stall> stall = stall_by_rank_0(*world);
    const auto error = error_of(*world->all_reduce(mine.view, ReduceOp::kSum, within(rank == 0 ? 300ms : 20s)));
    CHECK(error.has_value());
    if (rank == 0) {
      CHECK(error->kind() == ErrorKind::kTimedOut && error->context().peer == 1);
      CHECK(std::string(error->what()).find("all_reduce #") == 0);
      CHECK(std::string(error->what()).find("rank 1 did not hand over its memory in time") != std::string::npos);
    }
    world->abort(*error);  // the other one waits for the same
  });
}

TEST(shm_a_wait_for_the_memory_of_a_stopped_rank_can_be_aborted) {
  const ShmJob job(2);
  run_ranks(2, [&job](int rank) {
    const auto world = job.communicator(rank);
    const Shared mine(*world, letter(rank, 1, kLarge));
    const std::optional<Stall> stall = stall_by_rank_0(*world);
    const WorkPtr sum = world->all_reduce(mine.view, ReduceOp::kSum);
    std::this_thread::sleep_for(100ms);
    world->abort(Error(ErrorKind::kPeerError, "somebody has had enough"));
    const auto error = error_of(*sum);
    CHECK(error && error->kind() == ErrorKind::kPeerError);
    CHECK(error && std::string(error->what()).find("somebody has had enough") != std::string::npos);
  });
}

TEST(shm_mail_in_the_memory_of_a_stopped_rank_holds_up_no_other) {
  ShmJob(2).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    std::optional<Stall> stall;
    if (world.rank() == 0) {
      stall.emplace();
      const Shared first(world, letter(0, 1, kLarge));
      const Shared second(world, letter(0, 2, kLarge));
      std::vector<std::int64_t> last = letter(0, 3, 10);
      const MailPtr sent = mailbox->send(first.view, 1, 1, {});
      const MailPtr other = mailbox->send(second.view, 1, 2, {});
      mailbox->send(view_of(last), 1, 3, {})->wait();
      world.barrier()->wait();
      stall.reset();
      sent->wait();
      other->wait();
    } else {
      std::vector<std::int64_t> first(kLarge);
      std::vector<std::int64_t> second(kLarge);
      std::vector<std::int64_t> last(10);
      const MailPtr one = mailbox->recv(view_of(first), 0, 1, {});
      const MailPtr two = mailbox->recv(view_of(second), 0, 2, {});
      mailbox->recv(view_of(last), 0, 3, {})->wait();
      check_letter(last, 0, 3);
      CHECK(!one->done() && !two->done());
      world.barrier()->wait();
      one->wait();
      two->wait();
      check_letter(first, 0, 1);
      check_letter(second, 0, 2);
    }
  });
}

TEST(shm_mail_in_the_memory_of_a_stopped_rank_is_late_and_the_next_one_comes) {
  ShmJob(2).run([](Communicator& world) {
    const auto mailbox = world.mailbox();
    std::vector<std::int64_t> next = letter(0, 2, 10);
    if (world.rank() == 0) {
      const Stall stall;
      const Shared large(world, letter(0, 1, kLarge));
      const auto error = error_of(*mailbox->send(large.view, 1, 1, {}));
      CHECK(error && error->kind() == ErrorKind::kPeerError && error->context().peer == 1);
      mailbox->send(view_of(next), 1, 1, {})->wait();
    } else {
      std::vector<std::int64_t> large(kLarge, -1);
      MailOptions hasty;
      hasty.timeout = 300ms;
      const auto error = error_of(*mailbox->recv(view_of(large), 0, 1, hasty));
      CHECK(error && error->kind() == ErrorKind::kTimedOut && error->context().peer == 0);
      CHECK_EQ(large[0], -1);
      std::vector<std::int64_t> got(10);
      mailbox->recv(view_of(got), 0, 1, {})->wait();
      check_letter(got, 0, 2);
    }
  });
}

// Its receiver reads it, where that is allowed, also when nobody waits there; or it goes through the ring.
TEST(shm_mail_into_the_memory_of_a_stopped_rank_comes_without_it) {
  for (const shm::Attach attach : {shm::Attach::kNever, shm::Attach::kAlways}) {
    for (const bool waits : {true, false}) {
      const ShmJob job(2, 20000ms, attach);
      job.run([waits](Communicator& world) {
        const auto mailbox = world.mailbox();
        if (world.rank() == 0) {
          const Stall stall;
          std::vector<std::int64_t> large = letter(0, 1, kLarge);
          mailbox->send(view_of(large), 1, 1, {})->wait();
        } else {
          const Shared mine(world, std::vector<std::int64_t>(kLarge, -1));
          const MailPtr work = mailbox->recv(mine.view, 0, 1, {});
          CHECK(waits || eventually([&] { return work->done(); }, 20s));
          work->wait();
          check_letter(mine.values(), 0, 1);
        }
        world.barrier()->wait();
      });
      const bool reads = attach == shm::Attach::kAlways && kernel_reads();
      CHECK_EQ(job.neighbourhood(1)->reads(), reads ? shm::chunks_of(kLarge * sizeof(std::int64_t)) : 0U);
    }
  }
}

TEST(shm_mail_of_a_rank_that_is_stopped_and_then_gone) {
  ShmJob job(2);
  run_ranks(2, [&job](int rank) {
    const auto world = job.communicator(rank);
    const auto mailbox = world->mailbox();
    if (rank == 0) {
      const Stall stall;
      const Shared large(*world, letter(0, 1, kLarge));
      const MailPtr sent = mailbox->send(large.view, 1, 1, {});
      std::this_thread::sleep_for(300ms);
      job.control(0)->abort("it broke");
      CHECK(error_of(*sent).has_value());
    } else {
      std::vector<std::int64_t> large(kLarge, -1);
      const auto error = error_of(*mailbox->recv(view_of(large), 0, 1, {}));
      CHECK(error && error->kind() == ErrorKind::kPeerError);
      CHECK(error && std::string(error->what()).find("it broke") != std::string::npos);
    }
  });
}
