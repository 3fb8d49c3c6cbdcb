// comm/nccl: the library that is loaded, its versions, and the config that it is given.
#include <dlfcn.h>

#include <cstdlib>

#include "comm/nccl/nccl_library.h"
#include "native/nccl_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

struct HandleOf {
  explicit HandleOf(const char* path) : handle(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {}
  ~HandleOf() {
    if (handle != nullptr) {
      dlclose(handle);
    }
  }
  void* handle;
};

}  // namespace

TEST(nccl_library_says_what_it_is) {
  fake_nccl::Rules rules;
  rules.version = 22703;
  fake_nccl::reset(rules);
  const HandleOf fake(HPCOMM_TEST_NCCL_LIBRARY);
  CHECK(fake.handle != nullptr);
  const nccl::Library read = nccl::read_library(fake.handle, "here");
  CHECK_EQ(read.version_text(), "2.27.3");
  CHECK(read.CommRevoke != nullptr && read.MemAlloc != nullptr);
  rules.version = 22605;
  fake_nccl::reset(rules);
  CHECK_THROWS(ErrorKind::kTransport, nccl::read_library(fake.handle, "here"),
               "here is NCCL 2.26.5; hpcomm needs 2.27");
  const HandleOf other("libcudart.so.13");
  CHECK_THROWS(ErrorKind::kTransport, nccl::read_library(other.handle, "there"), "there is no NCCL");
  fake_nccl::reset();
  ::setenv("HPCOMM_NCCL_LIBRARY", HPCOMM_TEST_NCCL_LIBRARY, 1);
  CHECK(nccl_version().find(HPCOMM_TEST_NCCL_LIBRARY) != std::string::npos);
}

TEST(nccl_config_fits_the_version) {
  nccl::Library nccl;
  nccl.version = 22703;
  const nccl::Config old = make_config(nccl, {}, true);
  CHECK_EQ(old.size, offsetof(nccl::Config, n_channels_per_net_peer));
  CHECK_EQ(old.version, 22700);
  CHECK_EQ(old.blocking, 0);
  CHECK_EQ(old.min_ctas, nccl::kUndefined);
  CHECK_EQ(old.cga_cluster_size, nccl::kUndefined);
  nccl.version = 23200;
  NcclOptions options;
  options.min_ctas = 2;
  options.max_ctas = 8;
  options.cga_cluster_size = 0;
  const nccl::Config recent = make_config(nccl, options, true);
  // Up to its last field, without the padding: there lies the next field of 2.31.
  CHECK_EQ(recent.size, offsetof(nccl::Config, launch_order_implicit) + sizeof(int));
  CHECK_EQ(recent.version, 23100);
  CHECK_EQ(recent.launch_order_implicit, 1);
  CHECK_EQ(recent.min_ctas, 2);
  CHECK_EQ(recent.max_ctas, 8);
  CHECK_EQ(recent.cga_cluster_size, 0);
  CHECK_EQ(make_config(nccl, options, false).launch_order_implicit, nccl::kUndefined);
}

TEST(nccl_every_version_takes_the_config_and_children_inherit_it) {
  for (int version : {22700, 22703, 22809, 22907, 23003, 23007, 23100, 23200}) {
    fake_nccl::Rules rules;
    rules.version = version;
    NcclJob job(2, rules);
    job.run_threads([&](int rank) {
      NcclOptions options;
      options.min_ctas = 1;
      options.max_ctas = 4;
      options.cga_cluster_size = 2;
      const auto world = job.communicator(rank, "world", options);
      const auto child = world->split(0, 0);
      const fake_nccl::SeenConfig seen = fake_nccl::last_config();
      CHECK_EQ(seen.blocking, blocking_of_environment() ? 1 : 0);
      CHECK_EQ(seen.min_ctas, 1);
      CHECK_EQ(seen.max_ctas, 4);
      CHECK_EQ(seen.cga_cluster_size, 2);
      child->barrier()->wait();
      child->close();
      world->close();
    });
  }
}

TEST(nccl_lanes_may_have_limits_of_their_own) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    NcclOptions options;
    options.max_ctas = 16;
    options.lanes["gradient"] = {2, 8, 1};
    const auto world = job.communicator(rank, "world", options);
    CHECK_EQ(fake_nccl::last_config().max_ctas, 16);
    world->barrier()->wait();  // both have looked
    const auto gradient = world->subgroup({0, 1}, "gradient");
    const fake_nccl::SeenConfig seen = fake_nccl::last_config();
    CHECK_EQ(seen.min_ctas, 2);
    CHECK_EQ(seen.max_ctas, 8);
    CHECK_EQ(seen.cga_cluster_size, 1);
    world->barrier()->wait();
    const auto forward = gradient->subgroup({0, 1}, "forward");
    CHECK_EQ(fake_nccl::last_config().max_ctas, 16);
    forward->barrier()->wait();
    forward->close();
    gradient->close();
    world->close();
  });
}

TEST(nccl_options_are_checked) {
  NcclJob job(1);
  NcclOptions options;
  options.min_ctas = 5;
  options.max_ctas = 4;
  CHECK_THROWS(ErrorKind::kInvalidArgument, job.communicator(0, "a", options), "min_ctas is 5, max_ctas 4");
  options = {};
  options.cga_cluster_size = 9;
  CHECK_THROWS(ErrorKind::kInvalidArgument, job.communicator(0, "a", options), "cga_cluster_size is 9");
  options = {};
  options.lanes["gradient"] = {3, 2, -1};
  CHECK_THROWS(ErrorKind::kInvalidArgument, job.communicator(0, "a", options), "lane gradient: min_ctas is 3");
  CommunicatorConfig config = job.config(0);
  config.stream = make_worker_stream("cpu");
  CHECK_THROWS(ErrorKind::kInvalidArgument, make_nccl_communicator(config), "needs a CUDA stream");
}

TEST(nccl_ranks_that_want_different_things_are_told) {
  NcclJob job(2);
  job.run_threads([&](int rank) {
    NcclOptions options;
    options.max_ctas = 4 + rank;
    if (rank == 1) {
      CHECK_THROWS(ErrorKind::kSchemaMismatch, job.communicator(rank, "a", options), "rank 0 has NCCL 2.29.7");
      job.control(1)->abort("different options");
    } else {
      CHECK_THROWS(ErrorKind::kPeerError, job.communicator(rank, "a", options), "different options");
    }
  });
}
