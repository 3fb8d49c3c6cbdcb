// memfd: committed before use, sealed against shrinking, because either would be a SIGBUS in the middle of a copy.
#include "comm/shm/segment.h"

#include <fcntl.h>
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
std::optional<std::size_t> number_in(const char* path, const std::string& key = {}) {
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

// What this process can still be given: of the machine, and of its control group. fallocate() itself would go on until
// the kernel kills somebody.
std::size_t available_memory() {
  std::size_t available = SIZE_MAX;
  if (const auto kilobytes = number_in("/proc/meminfo", "MemAvailable:")) {
    available = *kilobytes * 1024;
  }
  struct Files {
    const char* limit;
    const char* usage;
    const char* stat;
    const char* reclaimable;
  };
  for (const Files& files :
       {Files{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat",
              "inactive_file"},
        Files{"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
              "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file"}}) {
    const auto limit = number_in(files.limit);
    const auto usage = number_in(files.usage);
    if (limit && usage) {
      const std::size_t used = *usage - std::min(*usage, number_in(files.stat, files.reclaimable).value_or(0));
      available = std::min(available, *limit - std::min(*limit, used));
    }
  }
  return available;
}

}  // namespace

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
    do {
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
