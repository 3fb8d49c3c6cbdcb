// Finds NCCL, reads its functions and fills its config struct by version.
#include "comm/nccl/nccl_library.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace hpcomm::nccl {

namespace {

// Fields that a version does not have end the struct it is told of.
constexpr std::size_t kSize227 = offsetof(Config, n_channels_per_net_peer);
// Not sizeof(Config): the padding behind our last field is where 2.31 has its next one (numRmaSig), and zeros there
// would be values of ours.
constexpr std::size_t kSize231 = offsetof(Config, launch_order_implicit) + sizeof(Config::launch_order_implicit);
constexpr int kOrderInConfig = version_code(2, 31, 0);

std::atomic<bool> launch_order_in_time = false;

// As hpcomm/nccl_variables.py, which says why, for programs without Python. At load, while there is one thread: whoever
// reads the environment while another changes it may read what is gone. What is set stays: who sets the first to 0 gets
// the order from events instead (launch_order.h).
[[maybe_unused]] const bool variables_are_set = [] {
  ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
  ::setenv("NCCL_LAUNCH_RACE_FATAL", "0", 0);
  ::setenv("NCCL_GRAPH_REGISTER", "0", 0);
  return true;
}();

template <typename Function>
void look_up(void* handle, const char* name, Function& function) {
  // POSIX: a function's address travels as void*.
  void* address = dlsym(handle, name);
  std::memcpy(&function, &address, sizeof address);
}

std::string last_dl_error() {
  const char* text = dlerror();
  return text == nullptr ? "not found" : text;
}

void* open_library(std::string& path) {
  const char* named = std::getenv("HPCOMM_NCCL_LIBRARY");
  if (named != nullptr && *named != '\0') {
    path = named;
    if (void* handle = dlopen(named, RTLD_NOW | RTLD_LOCAL)) {
      return handle;
    }
    throw Error(ErrorKind::kTransport, str("HPCOMM_NCCL_LIBRARY=", named, " cannot be loaded: ", last_dl_error()));
  }
  constexpr const char* kName = "libnccl.so.2";
  path = str(kName, " (loaded already)");
  if (void* handle = dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) {
    return handle;
  }
  path = kName;
  if (void* handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL)) {
    return handle;
  }
  throw Error(ErrorKind::kTransport,
              str("no NCCL: the process has loaded no ", kName,
                  " (a torch with CUDA brings one) and the dynamic loader ", "finds none: ", last_dl_error(),
                  ". Import torch first, or put the folder of ", kName, " into LD_LIBRARY_PATH"));
}

}  // namespace

std::string Library::version_text() const { return str(version / 10000, '.', version / 100 % 100, '.', version % 100); }

std::string Library::words(Result result, CommHandle comm) const {
  std::string text = str("NCCL ", version_text(), ": ", GetErrorString(result));
  const char* last = GetLastError(comm);
  if (last != nullptr && *last != '\0') {
    text += str(" (", last, ")");
  }
  return text;
}

Library read_library(void* handle, const std::string& path) {
  Library nccl;
  nccl.path = path;
  std::string missing;
#define HPCOMM_NCCL_LOOK_UP(name, result, parameters) look_up(handle, "nccl" #name, nccl.name);
#define HPCOMM_NCCL_REQUIRE(name, result, parameters) \
  HPCOMM_NCCL_LOOK_UP(name, result, parameters)       \
  if (nccl.name == nullptr) {                         \
    missing += " nccl" #name;                         \
  }
  HPCOMM_NCCL_REQUIRED(HPCOMM_NCCL_REQUIRE)
  HPCOMM_NCCL_OPTIONAL(HPCOMM_NCCL_LOOK_UP)
#undef HPCOMM_NCCL_REQUIRE
#undef HPCOMM_NCCL_LOOK_UP
  if (nccl.GetVersion == nullptr || nccl.GetVersion(&nccl.version) != Result::kSuccess) {
    throw Error(ErrorKind::kTransport, str(path, " is no NCCL: it does not tell its version"));
  }
  if (nccl.version < kOldestVersion) {
    throw Error(ErrorKind::kTransport, str(path, " is NCCL ", nccl.version_text(),
                                           "; hpcomm needs 2.27 or newer, which torch 2.9 and later bring"));
  }
  if (!missing.empty()) {
    throw Error(ErrorKind::kTransport, str(path, " says it is NCCL ", nccl.version_text(), " and lacks", missing));
  }
  return nccl;
}

const Library& library() {
  // Never destroyed: teardown threads may call NCCL until the process is gone.
  static std::mutex& mutex = *new std::mutex;
  static const Library* loaded = nullptr;
  const std::lock_guard lock(mutex);
  if (loaded == nullptr) {
    std::string path;
    void* handle = open_library(path);
    loaded = std::make_unique<Library>(read_library(handle, path)).release();
  }
  return *loaded;
}

bool can_block(const Library& nccl) { return nccl.CommRevoke != nullptr; }

Config make_config(const Library& nccl, const NcclLimits& limits, bool launch_order_implicit, bool blocking) {
  Config config{};
  config.size = nccl.version >= kOrderInConfig ? kSize231 : kSize227;
  config.magic = kConfigMagic;
  config.version = static_cast<unsigned>(nccl.version >= kOrderInConfig ? kOrderInConfig : kOldestVersion);
  config.blocking = blocking ? 1 : 0;
  config.cga_cluster_size = limits.cga_cluster_size >= 0 ? limits.cga_cluster_size : kUndefined;
  config.min_ctas = limits.min_ctas > 0 ? limits.min_ctas : kUndefined;
  config.max_ctas = limits.max_ctas > 0 ? limits.max_ctas : kUndefined;
  config.split_share = kUndefined;
  config.traffic_class = kUndefined;
  config.collnet_enable = kUndefined;
  config.cta_policy = kUndefined;
  config.shrink_share = kUndefined;
  config.nvls_ctas = kUndefined;
  config.n_channels_per_net_peer = kUndefined;
  config.nvlink_centric_sched = kUndefined;
  config.graph_usage_mode = kUndefined;
  config.num_rma_ctx = kUndefined;
  config.max_p2p_peers = kUndefined;
  config.graph_stream_ordering = kUndefined;
  config.launch_order_implicit = launch_order_implicit ? 1 : kUndefined;
  return config;
}

bool asks_for_launch_order() {
  const char* asked = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  return asked != nullptr && std::atoi(asked) != 0;
}

bool keeps_launch_order(const Library& nccl, bool asked) {
  if (!asked || nccl.version >= kOrderInConfig || launch_order_in_time) {
    return asked;
  }
  static std::once_flag told;
  std::call_once(told, [&] {
    std::fprintf(
        stderr,
        "hpcomm: NCCL %s may have been used before NCCL_LAUNCH_ORDER_IMPLICIT was set, so events keep its "
        "kernels in order, and collectives overlap nothing on other lanes. Import hpcomm before CUDA is used, or start "
        "the process with NCCL_LAUNCH_ORDER_IMPLICIT=1\n",
        nccl.version_text().c_str());
  });
  return false;
}

}  // namespace hpcomm::nccl

namespace hpcomm {

namespace {

bool switch_of_environment(const char* name, bool otherwise) {
  const char* const wish = std::getenv(name);
  HPCOMM_REQUIRE(wish == nullptr || std::strcmp(wish, "0") == 0 || std::strcmp(wish, "1") == 0, name, " is \"", wish,
                 "\"; set 0 or 1");
  return wish == nullptr ? otherwise : *wish == '1';
}

}  // namespace

bool blocking_of_environment() { return switch_of_environment("HPCOMM_NCCL_BLOCKING", true); }

bool registration_of_environment() { return switch_of_environment("HPCOMM_NCCL_REGISTER", false); }

void set_launch_order_in_time(bool in_time) noexcept { nccl::launch_order_in_time = in_time; }

std::string nccl_version() {
  try {
    const nccl::Library& nccl = nccl::library();
    return str(nccl.version_text(), ", ", nccl.path);
  } catch (const Error&) {
    return "";
  }
}

}  // namespace hpcomm
