// memfd: committed before use, sealed against shrinking, because either would be a SIGBUS in the middle of a copy.
#include "comm/shm/segment.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "base/error.h"

namespace hpcomm::shm {

namespace {

// The number in a file that holds nothing else, or the one behind `key`; empty when there is none ("max").
std::optional<std::size_t> number_in(const std::string& path, const std::string& key = {}) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (key.empty() || word == key) {
      std::size_t number = 0;
      if (!key.empty() && !(file >> word)) {
        break;
      }
      std::istringstream text(word);
      return text >> number ? std::optional(number) : std::nullopt;
    }
  }
  return std::nullopt;
}

// What a version of control groups calls its files.
struct GroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // in memory.stat
};
constexpr GroupFiles kVersion1{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                               "total_inactive_file"};
constexpr GroupFiles kVersion2{"sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};

// What the group at `path`, and each that it is in, has left: whichever has least. A path that is not mounted here, as
// in a container that sees the host's, counts from where the mount begins.
std::size_t left_in_group(const std::string& root, const GroupFiles& files, std::string path) {
  std::size_t left = SIZE_MAX;
  for (;;) {
    const std::string folder = root + files.mount + path + "/";
    const auto limit = number_in(folder + files.limit);
    const auto usage = number_in(folder + files.usage);
    if (limit && usage) {
      const std::size_t cached = number_in(folder + "memory.stat", files.reclaimable).value_or(0);
      const std::size_t used = *usage - std::min(*usage, cached);
      left = std::min(left, *limit - std::min(*limit, used));
    }
    if (path.empty()) {
      return left;
    }
    path.resize(path.rfind('/'));
  }
}

class AllSignalsLater {
 public:
  AllSignalsLater() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  AllSignalsLater(const AllSignalsLater&) = delete;
  AllSignalsLater& operator=(const AllSignalsLater&) = delete;
  ~AllSignalsLater() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

std::size_t available_memory(const std::string& root) {
  std::size_t available = SIZE_MAX;
  if (const auto kilobytes = number_in(root + "proc/meminfo", "MemAvailable:")) {
    available = *kilobytes * 1024;
  }
  // A line is "0::/path" in version 2; "9:cpu,memory:/path" in version 1.
  std::ifstream groups(root + "proc/self/cgroup");
  std::string own1 = "/";
  std::string own2 = "/";
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) {
      continue;
    }
    const std::string kinds = "," + line.substr(first + 1, second - first - 1) + ",";
    if (kinds == ",,") {
      own2 = line.substr(second + 1);
    } else if (kinds.find(",memory,") != std::string::npos) {
      own1 = line.substr(second + 1);
    }
  }
  const auto left = [&root](const GroupFiles& files, const std::string& path) {
    return left_in_group(root, files, path == "/" ? "" : path);
  };
  return std::min({available, left(kVersion1, own1), left(kVersion2, own2)});
}

Segment::Segment(control::Fd fd, std::size_t size) : fd_(std::move(fd)), size_(size) {
  void* address = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (address == MAP_FAILED) {
    throw Error(ErrorKind::kTransport, str("mapping ", size_, " bytes of shared memory: ", std::strerror(errno)));
  }
  data_ = static_cast<char*>(address);
  // Fewer page faults and TLB misses where the system allows it; nothing depends on it.
  (void)::madvise(data_, size_, MADV_HUGEPAGE);
}

Segment::~Segment() { (void)::munmap(data_, size_); }

std::shared_ptr<Segment> Segment::create(const std::string& what, std::size_t bytes) {
  HPCOMM_ASSERT(bytes > 0, "an empty segment");
  auto fd = control::Fd::open([] { return ::memfd_create("hpcomm", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
  // fallocate and not posix_fallocate, which writes page by page where a kernel lacks the call.
  int error = fd.valid() ? 0 : errno;
  const std::size_t available = available_memory();
  if (error == 0) {
    error = bytes > available ? ENOMEM : 0;
  }
  if (error == 0) {
    // A signal would end it, and kernels give back then what they have allocated so far: those of a timer come sooner
    // each time than a large segment takes.
    const AllSignalsLater later;
    do {  // who stops this process cannot be put off
      error = ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (error == EINTR);
  }
  if (error != 0) {
    throw Error(ErrorKind::kTransport, str("no ", bytes, " bytes of shared memory for ", what, ": ",
                                           std::strerror(error), " (", available, " bytes are available to it)"));
  }
  (void)::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  return std::shared_ptr<Segment>(new Segment(std::move(fd), bytes));
}

std::shared_ptr<Segment> Segment::adopt(control::Fd fd) {
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0 || info.st_size <= 0) {
    throw Error(ErrorKind::kTransport, "a shared memory descriptor without memory");
  }
  return std::shared_ptr<Segment>(new Segment(std::move(fd), static_cast<std::size_t>(info.st_size)));
}

}  // namespace hpcomm::shm
