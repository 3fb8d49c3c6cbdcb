// comm/emulated: NCCL's rules over a transport that has none of them, and plans run under them.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/emulated/emulated_communicator.h"
#include "engine/edge.h"
#include "native/check.h"
#include "native/patience.h"
#include "native/plan_fixtures.h"
#include "native/shm_job.h"
#include "native/thread_communicator.h"
#include "plan/compile.h"
#include "plan/verify.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;
using Start = EmulationConfig::Start;

namespace {

// A transport that buffers whatever it is given, as gloo does with small messages: who only sends never waits.
class Buffering final : public HostCommunicator {
 public:
  struct Post {
    std::mutex mutex;
    std::map<std::pair<int, int>, std::deque<std::string>> letters;
  };
  Buffering(CommunicatorConfig members, std::shared_ptr<Post> post)
      : HostCommunicator(std::move(members)), post_(std::move(post)) {
    watch_peers();
  }
  ~Buffering() override { shut_down(); }
  [[nodiscard]] const char* transport() const noexcept override { return "buffering"; }

 protected:
  [[nodiscard]] std::shared_ptr<Communicator> make_child(CommunicatorConfig) override { return nullptr; }
  void interrupt() noexcept override {}
  void execute(const Operation& operation, Deadline) override {
    const int peer = operation.peer;
    const std::string data(static_cast<const char*>(operation.input.data), operation.input.bytes);
    const auto keep = [&](const std::string& letter) {
      std::memcpy(operation.output.data, letter.data(), operation.output.bytes);
    };
    if (operation.kind == Operation::Kind::kSend) {
      put(peer, data);
    } else if (operation.kind == Operation::Kind::kRecv) {
      keep(take(peer));
    } else if (operation.kind == Operation::Kind::kBroadcast) {
      rank() == peer ? put(1 - peer, data) : keep(take(peer));
    } else {
      HPCOMM_ASSERT(operation.kind == Operation::Kind::kBarrier, "a test wants more");
      put(1 - rank(), "");
      (void)take(1 - rank());
    }
  }

 private:
  void put(int peer, const std::string& letter) {
    const std::lock_guard lock(post_->mutex);
    post_->letters[{rank(), peer}].push_back(letter);
  }
  std::string take(int peer) {
    std::string letter;
    CHECK(eventually([&] {
      const std::lock_guard lock(post_->mutex);
      auto& letters = post_->letters[{peer, rank()}];
      const bool there = !letters.empty();
      if (there) {
        letter = std::move(letters.front());
        letters.pop_front();
      }
      return there;
    }));
    return letter;
  }

  std::shared_ptr<Post> post_;
};

struct Setup {
  Start start = Start::kIssueOrder;
  unsigned seed = 1;
  bool connects = false;
};
constexpr std::array<Start, 2> kStarts{Start::kIssueOrder, Start::kAdversarial};

std::shared_ptr<Communicator> emulated(std::shared_ptr<Communicator> inner, const Setup& setup) {
  EmulationConfig emulation;
  emulation.start = setup.start;
  emulation.seed = setup.seed;
  emulation.delay = 300us;
  emulation.connects = setup.connects;
  emulation.device = std::make_shared<EmulatedDevice>();
  return make_emulated_communicator(std::move(inner), std::move(emulation));
}

std::string message_of(const WorkPtr& work) {
  const auto error = error_of(*work);
  return error ? error->what() : "";
}

// For tests in which every rank fails by itself: their errors are looked at, so none may end the others.
template <typename Body>
void run_to_the_end(const ThreadJob& job, int size, const Setup& setup, const Body& body) {
  std::atomic<int> left = size;
  run_ranks(size, [&](int rank) {
    body(emulated(job.communicator(rank), setup));
    --left;
    CHECK(eventually([&] { return left == 0; }, 20000ms));
  });
}

// What a runner does with a plan, without the computing.
void walk(const plan::StepPlan& plan, const std::shared_ptr<Communicator>& world) {
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (const plan::CommunicatorSpec& spec : plan.communicators) {
    const bool mine = std::count(spec.ranks.begin(), spec.ranks.end(), world->rank()) > 0;
    communicators.push_back(mine ? world->subgroup(spec.ranks, plan::to_string(spec.lane)) : nullptr);
  }
  std::map<int, WorkPtr> works;
  // Owned by their operations too: an error leaves this function while others are under way.
  std::vector<std::shared_ptr<std::vector<float>>> buffers;
  std::map<int, int> expected;  // transfer -> its place among the transfers
  for (const plan::Issue& issue : plan.lists[static_cast<std::size_t>(world->rank())]) {
    const plan::Operation& op = plan.operations[static_cast<std::size_t>(issue.op)];
    if (plan::is_compute(op.kind)) {
      for (const plan::Dependency& dependency : plan.dependencies) {
        if (dependency.after == issue.op && works.count(dependency.before) > 0) {
          works[dependency.before]->wait();
        }
      }
      continue;
    }
    if (op.communicator < 0) {
      continue;
    }
    const auto& lane = communicators[static_cast<std::size_t>(op.communicator)];
    const auto peer = [&](int participant) {
      const auto& ranks = lane->ranks();
      return static_cast<int>(std::find(ranks.begin(), ranks.end(), participant) - ranks.begin());
    };
    const bool transfer = op.kind == plan::OpKind::kTransfer;
    const bool receives = transfer && op.participants[1] == world->rank();
    buffers.push_back(
        std::make_shared<std::vector<float>>(16, receives ? 0.0F : static_cast<float>(transfer ? issue.op : 1)));
    OpOptions options;
    options.keepalive = buffers.back();
    const BufferView view = view_of(*buffers.back());
    if (receives) {
      works[issue.op] = lane->recv(view, peer(op.participants[0]), options);
      expected[issue.op] = static_cast<int>(buffers.size()) - 1;
    } else if (transfer) {
      works[issue.op] = lane->send(view, peer(op.participants[1]), options);
    } else {
      works[issue.op] = lane->all_reduce(view, ReduceOp::kSum, options);
    }
  }
  for (const auto& [op, work] : works) {
    work->wait();
  }
  for (const auto& [op, at] : expected) {
    CHECK_EQ(buffers[static_cast<std::size_t>(at)]->front(), static_cast<float>(op));
  }
}

}  // namespace

TEST(emulated_rules_are_parsed) {
  const EmulationConfig plain = parse_emulation("nccl");
  CHECK(plain.start == Start::kIssueOrder);
  CHECK_EQ(plain.seed, 1);
  CHECK(plain.connects);
  const EmulationConfig all = parse_emulation("nccl:lanes:seed=18446744073709551615:delay=0");
  CHECK(all.start == Start::kAdversarial);
  CHECK_EQ(all.seed, 18446744073709551615ULL);
  CHECK_EQ(all.delay.count(), 0);
  CHECK_EQ(parse_emulation("nccl:delay=250:seed=7").delay.count(), 250);
  for (const char* wrong : {"", "gloo", "nccl:", "nccl::lanes", "nccl:lane", "nccl:seed=", "nccl:seed=-1",
                            "nccl:seed=1x", "nccl:delay=60000001", "lanes:nccl", "nccl,lanes", "ncclx"}) {
    CHECK_THROWS(ErrorKind::kInvalidArgument, parse_emulation(wrong), "expected nccl[:lanes][:seed=N]");
  }
}

TEST(emulated_operations_end_when_their_peers_have_started) {
  for (const Start start : kStarts) {
    const ThreadJob job(2);
    const auto post = std::make_shared<Buffering::Post>();
    std::atomic<int> waited = 0;
    run_ranks(2, [&](int rank) {
      CommunicatorConfig config;
      config.name = config.lane = "buffering";
      config.ranks = {0, 1};
      config.rank = rank;
      config.stream = make_worker_stream("inner");
      config.control = job.control(rank);
      const auto comm = emulated(std::make_shared<Buffering>(std::move(config), post), {start, 1});
      std::vector<std::int64_t> number{rank == 0 ? 41 : 0};
      if (rank == 0) {
        const WorkPtr sent = comm->send(view_of(number), 1);
        CHECK(!sent->wait_until(Clock::now() + 30ms));
        {
          const std::lock_guard lock(post->mutex);
          CHECK((post->letters[{0, 1}].empty()));  // not even the data has moved
        }
        waited = 1;
        sent->wait();
        number[0] = 42;
        const WorkPtr told = comm->broadcast(view_of(number), 0);
        CHECK(!told->wait_until(Clock::now() + 30ms));
        waited = 2;
        told->wait();
      } else {
        CHECK(eventually([&] { return waited == 1; }));
        comm->recv(view_of(number), 0)->wait();
        CHECK_EQ(number[0], 41);
        CHECK(eventually([&] { return waited == 2; }));
        comm->broadcast(view_of(number), 0)->wait();
        CHECK_EQ(number[0], 42);
      }
    });
  }
}

TEST(emulated_operations_are_those_of_the_transport) {
  for (const Start start : kStarts) {
    const ThreadJob job(3);
    job.run([&](const std::shared_ptr<Communicator>& inner) {
      const auto comm = emulated(inner, {start, 5});
      const double mine = std::pow(10.0, comm->rank());
      std::vector<double> sum{mine};
      comm->all_reduce(view_of(sum), ReduceOp::kSum)->wait();
      CHECK_EQ(sum[0], 111.0);
      std::vector<double> parts{mine, 2 * mine, 3 * mine};
      std::vector<double> part(1);
      comm->reduce_scatter(view_of(part), view_of(parts), ReduceOp::kSum)->wait();
      CHECK_EQ(part[0], 111.0 * (comm->rank() + 1));
      std::vector<double> own{mine};
      std::vector<double> all(3);
      comm->all_gather(view_of(all), view_of(own))->wait();
      CHECK_EQ(all, (std::vector<double>{1, 10, 100}));
      std::vector<double> told{mine};
      comm->broadcast(view_of(told), 2)->wait();
      CHECK_EQ(told[0], 100.0);
      std::vector<double> mixed(3);
      comm->all_to_all(view_of(mixed), view_of(parts))->wait();
      CHECK_EQ(mixed[0], comm->rank() + 1.0);
      CHECK_EQ(mixed[2], 100.0 * (comm->rank() + 1));
      const int next = (comm->rank() + 1) % 3;
      const int before = (comm->rank() + 2) % 3;
      std::vector<double> got(1);
      // All at once, then one by one in their orders: as a ring of sends and receives it would wait for ever.
      comm->sendrecv(view_of(own), next, view_of(got), before)->wait();
      CHECK_EQ(got[0], std::pow(10.0, before));
      // Rank 0 sends first, the others receive first: a ring that ends without any buffer.
      if (comm->rank() == 0) {
        comm->send(view_of(own), next)->wait();
        comm->recv(view_of(got), before)->wait();
      } else {
        comm->recv(view_of(got), before)->wait();
        comm->send(view_of(own), next)->wait();
      }
      CHECK_EQ(got[0], std::pow(10.0, before));
      comm->barrier()->wait();
      OpOptions here;
      here.inline_when_idle = true;
      std::vector<double> again{mine};
      CHECK(eventually([&] { return comm->stream().idle(); }));
      const WorkPtr reduced = comm->all_reduce(view_of(again), ReduceOp::kSum, here);
      CHECK(start == Start::kIssueOrder || reduced->done());  // with one slot it takes its place in the queue
      reduced->wait();
      CHECK_EQ(again[0], 111.0);
      CHECK(comm->mailbox() == nullptr);
      const auto child = comm->split(comm->rank() == 1 ? 1 : 0, 0);
      CHECK_EQ(std::string(child->transport()), "emulated");
      std::vector<double> some{mine};
      child->all_reduce(view_of(some), ReduceOp::kSum)->wait();
      CHECK_EQ(some[0], comm->rank() == 1 ? 10.0 : 101.0);
    });
  }
}

TEST(emulated_send_first_on_both_sides_names_both) {
  // With patience: both have to start their send within the limit to be seen by the other.
  for (const Start start : kStarts) {
    CHECK_EQ(
        with_patience(
            300ms,
            [start](milliseconds limit) {
              const ThreadJob job(2, 1, limit);
              std::vector<std::string> wrong(2);
              run_to_the_end(job, 2, {start, 3}, [&wrong](const std::shared_ptr<Communicator>& comm) {
                const int peer = 1 - comm->rank();
                std::vector<float> mine(1 << 18);
                std::vector<float> theirs(1 << 18);
                const WorkPtr sent = comm->send(view_of(mine), peer);
                // What stands behind it is not run on what is left.
                CHECK(error_of_issue([&] { return comm->recv(view_of(theirs), peer); }).has_value());
                const auto error = error_of(*sent);
                CHECK(error && error->kind() == ErrorKind::kTimedOut);
                CHECK_THROWS(ErrorKind::kTimedOut, comm->barrier(), "send #0");
                const std::string text = message_of(sent);
                CHECK(contains(text, str("send #0 to rank ", peer, " on lane world waits for rank ", peer)));
                if (!contains(text, str("rank ", peer, " has itself started a send (#0, 262144 float32) with rank ",
                                        comm->rank(), ": on one communicator one of the two has to receive first"))) {
                  wrong[static_cast<std::size_t>(comm->rank())] = text;
                }
              });
              return wrong[0] + wrong[1];
            }),
        "");
  }
}

TEST(emulated_lanes_of_their_own_exchange_in_both_directions) {
  for (const Start start : kStarts) {
    const bool one_slot = start == Start::kIssueOrder;
    const ThreadJob job(2, 1, one_slot ? 400ms : 20000ms);
    run_to_the_end(job, 2, {start, 3}, [&](const std::shared_ptr<Communicator>& comm) {
      const int me = comm->rank();
      const int peer = 1 - me;
      const std::shared_ptr<Communicator> lanes[2] = {comm->subgroup({0, 1}, "up"), comm->subgroup({0, 1}, "down")};
      std::vector<float> mine(1 << 18, static_cast<float>(me + 1));
      std::vector<float> theirs(1 << 18);
      const WorkPtr sent = lanes[me]->send(view_of(mine), peer);
      const WorkPtr got = lanes[peer]->recv(view_of(theirs), peer);
      const bool send_failed = error_of(*sent).has_value();
      const bool recv_failed = error_of(*got).has_value();
      // One slot makes it one queue again: this order needs two operations at the same time. (When the send of the one
      // has failed, its recv may still meet the send of the other.)
      CHECK_EQ(send_failed || recv_failed, one_slot);
      if (!one_slot) {
        CHECK_EQ(theirs.back(), static_cast<float>(peer + 1));
      }
    });
  }
}

TEST(emulated_first_operations_keep_the_host) {
  for (const Start start : kStarts) {
    const ThreadJob job(3);
    std::atomic<int> returned = 0;
    const auto issue = [&](const std::shared_ptr<Communicator>& comm, bool late, const auto& operation) {
      if (late) {
        std::this_thread::sleep_for(30ms);
        CHECK_EQ(returned.load(), 0);
      }
      const WorkPtr work = operation();
      ++returned;
      work->wait();
      comm->barrier()->wait();
      returned = 0;
      comm->barrier()->wait();
    };
    job.run([&](const std::shared_ptr<Communicator>& inner) {
      const auto comm = emulated(inner, {start, 1, true});
      const int me = comm->rank();
      std::vector<float> mine(64, static_cast<float>(me));
      std::vector<float> theirs(64);
      issue(comm, me == 2, [&] { return comm->all_reduce(view_of(mine), ReduceOp::kMax); });
      CHECK_EQ(mine[0], 2.0F);
      // A ring, whose halves are issued together.
      mine[0] = static_cast<float>(me);
      issue(comm, me == 1, [&] { return comm->sendrecv(view_of(mine), (me + 1) % 3, view_of(theirs), (me + 2) % 3); });
      CHECK_EQ(theirs[0], static_cast<float>((me + 2) % 3));
    });
  }
}

TEST(emulated_hosts_that_both_send_first_wait_for_each_other) {
  // With patience: both have to make their lanes within the limit.
  CHECK_EQ(with_patience(400ms,
                         [](milliseconds limit) {
                           const ThreadJob job(2, 1, limit);
                           std::vector<std::string> words(2);
                           std::atomic<int> told = 0;
                           run_to_the_end(job, 2, {Start::kAdversarial, 1, true},
                                          [&](const std::shared_ptr<Communicator>& comm) {
                                            const int me = comm->rank();
                                            std::vector<float> one(1);
                                            // Whoever is the second may learn that the other has given up the lane.
                                            try {
                                              const std::shared_ptr<Communicator> lanes[2] = {
                                                  comm->subgroup({0, 1}, "up"), comm->subgroup({0, 1}, "down")};
                                              CHECK(error_of(*lanes[me]->send(view_of(one), 1 - me)).has_value());
                                            } catch (const Error& error) {
                                              words[static_cast<std::size_t>(me)] = error.what();
                                              told += contains(error.what(), "NCCL connects ranks in the call") ? 1 : 0;
                                            }
                                          });
                           return told >= 1 ? "" : "nobody was told: " + words[0] + words[1];
                         }),
           "");
}

TEST(emulated_orders_that_differ_between_ranks_hang_in_one_slot) {
  for (const Start start : kStarts) {
    const bool one_slot = start == Start::kIssueOrder;
    const ThreadJob job(2, 1, 20000ms);
    run_to_the_end(job, 2, {start, 7}, [&](const std::shared_ptr<Communicator>& comm) {
      const auto first = comm->subgroup({0, 1}, "first");
      const auto second = comm->subgroup({0, 1}, "second");
      std::vector<float> a(4, 1);
      std::vector<float> b(4, 1);
      OpOptions hasty;
      hasty.timeout = one_slot ? 400ms : 20000ms;
      auto& front = comm->rank() == 0 ? first : second;
      auto& behind = comm->rank() == 0 ? second : first;
      // It keeps the slot until it is given up below, however late the other one is.
      const WorkPtr holds = front->all_reduce(view_of(a), ReduceOp::kSum);
      const WorkPtr waits = behind->all_reduce(view_of(b), ReduceOp::kSum, hasty);
      const std::string behind_text = message_of(waits);
      if (!one_slot) {
        CHECK_EQ(message_of(holds) + behind_text, "");
        CHECK_EQ(a[0] + b[0], 4.0F);
        return;
      }
      CHECK(contains(behind_text, str("all_reduce #0 on lane ", behind->lane(),
                                      " waits for the device slot held by all_reduce #0 on lane ", front->lane())));
      CHECK(!holds->done());
      front->abort(Error(ErrorKind::kClosed, "enough"));
      CHECK(contains(message_of(holds), "enough"));
    });
  }
}

TEST(emulated_holder_of_the_slot_says_who_waits_behind) {
  // With patience: the one behind has to be issued, and its lane to wait, within the limit of the other.
  CHECK_EQ(
      with_patience(300ms,
                    [](milliseconds limit) {
                      const ThreadJob job(2, 1, 60000ms);
                      std::string wrong;
                      run_to_the_end(job, 2, {}, [&](const std::shared_ptr<Communicator>& comm) {
                        const auto other = comm->subgroup({0, 1}, "other");
                        if (comm->rank() == 1) {
                          return;  // never comes
                        }
                        std::vector<float> a(4);
                        OpOptions hasty;
                        hasty.timeout = limit;
                        const WorkPtr holds = comm->all_reduce(view_of(a), ReduceOp::kSum, hasty);
                        const WorkPtr waits = other->barrier();
                        const std::string text = message_of(holds);
                        CHECK(contains(text, "all_reduce #0 on lane world"));
                        if (!contains(text, "; it holds the device slot, for which wait: barrier #0 on lane other")) {
                          wrong = text;
                        }
                        other->abort(Error(ErrorKind::kClosed, "enough"));
                        CHECK(contains(message_of(waits), "enough"));
                      });
                      return wrong;
                    }),
      "");
}

TEST(emulated_abort_ends_every_wait) {
  for (const Start start : kStarts) {
    const ThreadJob job(2);
    run_to_the_end(job, 2, {start, 1}, [&](const std::shared_ptr<Communicator>& comm) {
      if (comm->rank() == 1) {
        return;
      }
      const auto wait_and_abort = [](Communicator& self, const WorkPtr& work) {
        CHECK(!work->wait_until(Clock::now() + 20ms));
        self.abort(Error(ErrorKind::kClosed, "enough"));
        CHECK(contains(message_of(work), "enough"));
        CHECK_THROWS(ErrorKind::kClosed, self.barrier(), "enough");
      };
      std::vector<float> a(4);
      const WorkPtr head = comm->send(view_of(a), 1);
      wait_and_abort(*comm, head);
    });
  }
  const ThreadJob job(2);
  run_to_the_end(job, 2, {}, [](const std::shared_ptr<Communicator>& comm) {
    const auto other = comm->subgroup({0, 1}, "other");
    if (comm->rank() == 1) {
      return;
    }
    std::vector<float> a(4);
    const WorkPtr head = comm->send(view_of(a), 1);
    const WorkPtr behind = other->barrier();
    CHECK(!behind->wait_until(Clock::now() + 20ms));
    other->abort(Error(ErrorKind::kClosed, "enough"));
    CHECK(contains(message_of(behind), "enough"));
    CHECK(!head->done());
    comm->abort(Error(ErrorKind::kClosed, "enough"));
    CHECK(contains(message_of(head), "enough"));
  });
}

TEST(emulated_shared_memory_goes_on_after_a_mismatch_of_collectives) {
  for (const Start start : {Start::kIssueOrder, Start::kAdversarial}) {
    const ShmJob job(2);
    run_ranks(2, [&](int rank) {
      Setup setup;
      setup.start = start;
      const auto comm = emulated(job.communicator(rank), setup);
      std::vector<float> values(rank == 0 ? 4 : 5, 1.0F);
      const auto error = error_of(*comm->all_reduce(view_of(values), ReduceOp::kSum));
      CHECK(error && error->kind() == ErrorKind::kSchemaMismatch);
      values.resize(4);
      comm->all_reduce(view_of(values), ReduceOp::kSum)->wait();
      CHECK_EQ(values[3], 2.0F);
    });
  }
}

TEST(emulated_messages_of_different_sizes_are_a_mismatch_on_both_sides) {
  const ThreadJob job(2);
  run_to_the_end(job, 2, {}, [](const std::shared_ptr<Communicator>& comm) {
    std::vector<float> values(comm->rank() == 0 ? 4 : 5);
    const WorkPtr work = comm->rank() == 0 ? comm->send(view_of(values), 1) : comm->recv(view_of(values), 0);
    const auto error = error_of(*work);
    CHECK(error && error->kind() == ErrorKind::kSchemaMismatch);
    CHECK(contains(message_of(work), "#0, 4 float32") && contains(message_of(work), "#0, 5 float32"));
  });
}

TEST(emulated_receipts_keep_the_place_where_they_were_issued) {
  // Rank 0 issues the receipt, then a send on another lane; the header comes late. Were the recv given its place when
  // the header comes, the send would be first, and wait for a recv that rank 1 has behind its own send.
  const ThreadJob job(2);
  for (int round = 0; round < 5; ++round) {
    std::atomic<bool> issued = false;
    run_ranks(2, [&](int rank) {
      const auto comm = emulated(job.communicator(rank, str("receipts", round)), {});
      const auto up = comm->subgroup({0, 1}, "up");
      const auto down = comm->subgroup({0, 1}, "down");
      const auto allocator = std::make_shared<HeapAllocator>();
      std::vector<float> values(100, 10.0F);
      Schema schema;
      schema.structure = "one";
      TensorSchema tensor;
      tensor.dtype = DType::kFloat32;
      tensor.shape = {100};
      schema.tensors.push_back(tensor);
      const EdgeConfig edge{up, 1 - rank, SchemaMode::kPerMessage};
      if (rank == 0) {
        RecvEdge from(edge, allocator);
        const Receipt receipt = from.recv(-1);
        const WorkPtr sent = down->send(view_of(values), 1);
        std::this_thread::sleep_for(2ms);
        issued = true;
        receipt.work->wait();
        sent->wait();
      } else {
        SendEdge to(edge, allocator);
        CHECK(eventually([&] { return issued.load(); }));
        std::vector<float> got(100);
        const WorkPtr sent = to.send(schema, {values.data()}, nullptr, -1);
        const WorkPtr received = down->recv(view_of(got), 0);
        sent->wait();
        received->wait();
        CHECK_EQ(got.back(), 10.0F);
      }
    });
  }
}

TEST(emulated_inline_operations_and_tasks_of_the_lane_take_turns) {
  // Both may find the lane idle: the one runs in the caller, the other as a task that issues when its turn comes.
  for (const Start start : kStarts) {
    const ThreadJob job(1);
    EmulationConfig emulation;
    emulation.start = start;
    emulation.delay = 0us;
    emulation.device = std::make_shared<EmulatedDevice>();
    const auto comm = make_emulated_communicator(job.communicator(0), emulation);
    OpOptions here;
    here.inline_when_idle = true;
    std::atomic<int> ran = 0;
    std::thread caller([&] {
      for (int i = 0; i < 500; ++i) {
        comm->barrier(here)->wait();
      }
    });
    for (int i = 0; i < 500; ++i) {
      comm->stream().enqueue([&] {
        comm->barrier()->wait();
        ++ran;
      });
      comm->stream().synchronize();
    }
    caller.join();
    CHECK_EQ(ran.load(), 500);
  }
}

TEST(emulated_plans_that_verify_end) {
  using namespace plan;
  for (const auto& spec : {fixtures::one_f_one_b(2, 2, 4), fixtures::gpipe(3, 1, 3), fixtures::one_f_one_b(4, 1, 6)}) {
    const StepPlan step = compile(spec);
    (void)verify(step);
    for (const Start start : kStarts) {
      for (unsigned seed = 1; seed <= 3; ++seed) {
        const ThreadJob job(step.world(), seed);
        job.run([&](const std::shared_ptr<Communicator>& inner) { walk(step, emulated(inner, {start, seed, true})); });
      }
    }
  }
}

TEST(emulated_plans_that_do_not_verify_hang) {
  using namespace plan;
  // Two communicators, each consistent in itself, in different orders on two ranks.
  fixtures::HandMade hand(2, 2);
  const int left = hand.transfer(0, 1, 0, 0);
  const int right = hand.transfer(0, 1, 0, 1);
  const int first = hand.reduce(0);
  const int last = hand.reduce(1);
  hand.list(0, {first, left});
  hand.list(1, {right, first});
  hand.list(2, {left, last});
  hand.list(3, {last, right});
  CHECK_THROWS(ErrorKind::kDeadlock, verify(hand.plan()), "circle");
  for (const Start start : kStarts) {
    const bool one_slot = start == Start::kIssueOrder;
    const ThreadJob job(4, 1, one_slot ? 500ms : 20000ms);
    std::atomic<int> hung = 0;
    run_to_the_end(job, 4, {start, 2}, [&](const std::shared_ptr<Communicator>& comm) {
      try {
        walk(hand.plan(), comm);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kTimedOut);
        ++hung;
      }
    });
    CHECK_EQ(hung > 0, one_slot);
  }
}
