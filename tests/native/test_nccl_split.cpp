// comm/nccl: parts of a communicator by ncclCommSplit, as a mesh makes its axes; and splits that fail or never end.
#include <atomic>
#include <string>
#include <vector>

#include "base/hash.h"
#include "native/nccl_job.h"
#include "native/patience.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

constexpr int kSystemError = 2;
const bool kBlocking = blocking_of_environment();

// 10^rank of every member, summed.
void check_sum(Communicator& part) {
  const auto value = [&](int member) {
    float power = 1;
    for (int i = 0; i < part.ranks()[static_cast<std::size_t>(member)]; ++i) {
      power *= 10;
    }
    return power;
  };
  float expected = 0;
  for (int member = 0; member < part.size(); ++member) {
    expected += value(member);
  }
  DeviceVector<float> values(part.device().index, 3, value(part.rank()));
  part.all_reduce(values.view(), ReduceOp::kSum)->wait();
  CHECK_EQ(values[2], expected);
}

}  // namespace

TEST(nccl_what_will_not_be_split_keeps_one_communicator) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    const auto lane = make_nccl_communicator(job.config(rank, "lane"), {}, false);
    lane->barrier()->wait();
    job.meet(rank, 1);
    CHECK(eventually([] { return fake_nccl::live_communicators() == 2; }));
    job.meet(rank, 2);
    // It can be split all the same.
    const auto part = lane->split(0, 1 - rank, "part");
    CHECK_EQ(part->rank(), 1 - rank);
    check_sum(*part);
    job.meet(rank, 3);
    CHECK(eventually([] { return fake_nccl::live_communicators() == 4; }));
    job.meet(rank, 4);
    part->close();
    lane->close();
  });
}

TEST(nccl_axes_of_a_mesh_are_splits_of_the_world) {
  NcclJob job(4);
  job.run_threads([&](int rank) {
    NcclOptions options;
    options.max_ctas = 16;
    options.lanes["dp"] = {2, 8, 1};
    const auto world = job.communicator(rank, "world", options);
    world->barrier()->wait();  // a split comes behind what was issued
    // pp=2 x dp=2: the rows of an axis are made at once.
    const int pp = rank / 2;
    const int dp = rank % 2;
    const auto column = world->split(dp, 0, "pp");
    CHECK_EQ(fake_nccl::last_config().max_ctas, 16);
    job.meet(rank, 1);
    const auto row = world->split(2 * pp, 0, "dp");
    const fake_nccl::SeenConfig seen = fake_nccl::last_config();
    CHECK_EQ(seen.min_ctas, 2);
    CHECK_EQ(seen.max_ctas, 8);
    CHECK_EQ(seen.cga_cluster_size, 1);
    CHECK_EQ(seen.blocking, kBlocking ? 1 : 0);
    job.meet(rank, 2);
    CHECK_EQ(column->ranks(), (std::vector<int>{dp, dp + 2}));
    CHECK_EQ(column->lane(), "pp");
    CHECK_EQ(column->name(), str("world/pp:", dp, ",", dp + 2, "#0"));
    CHECK_EQ(row->ranks(), (std::vector<int>{2 * pp, 2 * pp + 1}));
    CHECK_EQ(row->rank(), dp);
    CHECK_EQ(row->lane(), "dp");
    CHECK_EQ(row->name(), str("world/dp:", 2 * pp, ",", 2 * pp + 1, "#0"));
    CHECK(row->stream().native_handle() != column->stream().native_handle());
    CHECK(row->stream().native_handle() != world->stream().native_handle());
    // A child of a row has its options, too.
    const auto again = row->split(0, -row->rank());
    CHECK_EQ(again->lane(), "dp");
    CHECK_EQ(again->rank(), 1 - row->rank());
    CHECK_EQ(fake_nccl::last_config().max_ctas, 8);
    for (const auto& part : {column, row, again}) {
      check_sum(*part);
    }
    for (const auto& part : {again, row, column, world}) {
      part->close();
    }
  });
  // A blocking one is itself a part of one that is not; only the world keeps that, so `again` begins anew.
  CHECK_EQ(fake_nccl::calls("ncclCommSplit"), kBlocking ? 16 : 12);
  CHECK_EQ(fake_nccl::calls("ncclCommInitRankConfig"), kBlocking ? 8 : 4);
  CHECK_EQ(fake_nccl::calls("ncclGetUniqueId"), kBlocking ? 3 : 1);
}

TEST(nccl_split_with_different_lanes_makes_nothing) {
  NcclJob job(3);
  job.run([&](Communicator& world) {
    const int rank = world.rank();
    // Rank 0 has a color of its own and hears of it as well: its ncclCommSplit would wait for the others.
    CHECK_THROWS(ErrorKind::kSchemaMismatch, world.split(rank == 0 ? 0 : 1, 0, str("lane ", rank)),
                 "ranks of color 1 want different lanes: rank 1 has \"lane 1\", rank 2 has \"lane 2\"");
    CHECK_EQ(fake_nccl::calls("ncclCommSplit"), kBlocking ? 3 : 0);  // those that made `world`
    job.meet(rank, 1);
    const auto part = world.split(rank == 0 ? 0 : 1, 0, "lane of two words");
    CHECK_EQ(part->lane(), "lane of two words");
    check_sum(*part);
    world.barrier()->wait();
    part->close();
  });
}

TEST(nccl_split_that_fails_ends_the_parent_on_all_ranks) {
  NcclJob job(3);
  std::atomic<int> failed = 0;
  std::atomic<int> told = 0;
  job.run_threads([&](int rank) {
    const auto world = job.communicator(rank);
    job.meet(rank, 1);
    if (rank == 1) {
      fake_nccl::fail("ncclCommSplit", 3, kSystemError);
    }
    job.meet(rank, 2);
    // Whoever comes last fails; the others are in NCCL by then.
    try {
      (void)world->split(rank, 0, "part");
    } catch (const Error& error) {
      const bool mine = error.kind() == ErrorKind::kTransport;
      (mine ? failed : told) += 1;
      CHECK(mine || error.kind() == ErrorKind::kPeerError);
      CHECK_EQ(error.context().rank, rank);
      CHECK_EQ(error.context().operation, "ncclCommSplit");
      CHECK(std::string(error.what()).find("ncclCommSplit #0 on lane world: ") != std::string::npos);
      CHECK(std::string(error.what()).find("unhandled system error") != std::string::npos);
      CHECK(mine == (error.context().peer < 0));
    }
    CHECK(eventually([&] { return world->aborted().has_value(); }, 20s));
    CHECK(error_of_issue([&] { return world->barrier(); }).has_value());
  });
  CHECK_EQ(failed, 1);
  CHECK_EQ(told, 2);
}

TEST(nccl_split_that_never_ends_names_the_rank_that_gave_up) {
  NcclJob job(2, {}, 3s);  // which both ranks have to come together, too
  job.run_threads([&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 1) {
      // Says what it wants, and does not come: as a rank does that is stuck between the two.
      const std::uint64_t channel = Fingerprint().add("world").add("split").add_int(0).value();
      (void)job.control(1)->exchange({0, 1}, channel, "0 0 world", Clock::now() + 20s);
      CHECK(eventually([&] { return world->aborted().has_value(); }, 20s));
      const auto why = world->aborted();
      CHECK(why && why->kind() == ErrorKind::kPeerError && why->context().peer == 0);
      CHECK_THROWS(ErrorKind::kPeerError, world->split(0, 0), "NCCL is still at it when the time is up");
      return;
    }
    CHECK_THROWS(ErrorKind::kTimedOut, world->split(0, 0), "ncclCommSplit #0 on lane world: NCCL is still at it");
    // NCCL takes no call of a communicator that it splits: only its end ends the split.
    const auto why = world->aborted();
    CHECK(why && why->kind() == ErrorKind::kTimedOut && why->context().rank == 0);
  });
  // Both parents, the two blocking parts of them, and what had become of the child.
  CHECK_EQ(fake_nccl::calls("ncclCommAbort"), kBlocking ? 5 : 3);
}

TEST(nccl_split_ends_when_a_peer_fails_meanwhile) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 1) {
      const std::uint64_t channel = Fingerprint().add("world").add("split").add_int(0).value();
      (void)job.control(1)->exchange({0, 1}, channel, "0 0 world", Clock::now() + 20s);
      CHECK(eventually([] { return fake_nccl::calls("ncclCommSplit") == (kBlocking ? 3 : 1); }, 20s));
      job.control(1)->abort("out of memory");
      return;
    }
    CHECK_THROWS(ErrorKind::kPeerError, world->split(0, 0), "out of memory");
    CHECK(world->aborted().has_value());
  });
}
