// Collectives of a single rank.
#include "comm/solo/solo_communicator.h"

#include <cstring>

#include "comm/host_communicator.h"

namespace hpcomm {

namespace {

class SoloCommunicator final : public HostCommunicator {
 public:
  explicit SoloCommunicator(CommunicatorConfig config) : HostCommunicator(std::move(config)) {
    HPCOMM_REQUIRE(size() == 1, "the solo transport is for one rank, not ", size());
    watch_peers();
  }
  ~SoloCommunicator() override { shut_down(); }

  [[nodiscard]] const char* transport() const noexcept override { return "solo"; }
  [[nodiscard]] bool can_poll() const noexcept override { return true; }  // it never waits

 protected:
  [[nodiscard]] std::shared_ptr<Communicator> make_child(CommunicatorConfig child) override {
    return make_solo_communicator(std::move(child));
  }
  void execute(const Operation& operation, Deadline) override {
    // One part of one: output and input have the same length in every collective, and messages have no peer.
    const BufferView& to = operation.output;
    const BufferView& from = operation.input;
    if (to.data != from.data && from.bytes > 0) {
      std::memcpy(to.data, from.data, from.bytes);
    }
  }
  void interrupt() noexcept override {}
};

}  // namespace

std::shared_ptr<Communicator> make_solo_communicator(CommunicatorConfig config) {
  return std::make_shared<SoloCommunicator>(std::move(config));
}

}  // namespace hpcomm
