// A job whose ranks are threads that share memory the way processes do: through segments, descriptors and futexes.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "comm/mailbox.h"
#include "comm/shm/near_control.h"
#include "comm/shm/neighbourhood.h"
#include "comm/shm/shm_communicator.h"
#include "native/check.h"
#include "native/thread_communicator.h"

namespace hpcomm::testing {

// The Controls of a job on one host.
inline std::vector<std::shared_ptr<Control>> connect_near_controls(int size) {
  std::vector<std::shared_ptr<Control>> controls = connect_controls(size);
  run_ranks(size, [&controls](int rank) {
    auto& mine = controls[static_cast<std::size_t>(rank)];
    const Deadline soon = Clock::now() + std::chrono::seconds(20);
    mine = shm::NearControl::over(mine, shm::Neighbourhood::discover(mine, soon), soon);
  });
  return controls;
}

// Does the kernel let processes read each other here? (gVisor does not, nor do some containers.)
inline bool kernel_reads() {
  char source = 'x';
  char target = 0;
  const iovec from{&source, 1};
  const iovec to{&target, 1};
  return ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0) == 1;
}

inline constexpr std::array kAttaches = {shm::Attach::kNever, shm::Attach::kMeasured, shm::Attach::kAlways};

class ShmJob {
 public:
  explicit ShmJob(int size, milliseconds timeout = milliseconds(20000), shm::Attach attach = shm::Attach::kMeasured)
      : size_(size),
        timeout_(timeout),
        controls_(size > 1 ? connect_controls(size) : std::vector{make_solo_control()}),
        neighbourhoods_(static_cast<std::size_t>(size)) {
    run_ranks(size, [this, attach](int rank) {
      auto& mine = controls_[static_cast<std::size_t>(rank)];
      auto& near = neighbourhoods_[static_cast<std::size_t>(rank)];
      near = shm::Neighbourhood::discover(mine, soon(), {}, {}, attach);
      mine = shm::NearControl::over(mine, near, soon());
    });
  }

  [[nodiscard]] const std::shared_ptr<Control>& control(int rank) const {
    return controls_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] const std::shared_ptr<shm::Neighbourhood>& neighbourhood(int rank) const {
    return neighbourhoods_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] std::shared_ptr<Communicator> communicator(int rank, const std::string& name = "world") const {
    CommunicatorConfig config;
    config.name = name;
    for (int r = 0; r < size_; ++r) {
      config.ranks.push_back(r);
    }
    config.rank = rank;
    config.lane = name;
    config.stream = make_worker_stream(name);
    config.control = control(rank);
    config.timeout = timeout_;
    return make_shm_communicator(std::move(config), neighbourhood(rank));
  }

  // Runs body(world communicator) on every rank. A rank that throws fails the test and ends the others.
  template <typename Body>
  void run(const Body& body) const {
    run_ranks(size_, [&](int rank) {
      try {
        const auto world = communicator(rank);
        body(*world);
        world->barrier()->wait();  // nobody leaves while others still move data
      } catch (const std::exception& error) {
        control(rank)->abort(error.what());
        throw;
      }
    });
  }

  [[nodiscard]] static Deadline soon() { return Clock::now() + std::chrono::seconds(20); }

 private:
  int size_;
  milliseconds timeout_;
  std::vector<std::shared_ptr<Control>> controls_;
  std::vector<std::shared_ptr<shm::Neighbourhood>> neighbourhoods_;
};

}  // namespace hpcomm::testing
