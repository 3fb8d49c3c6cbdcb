// Where a process runs, and the fields of a greeting.
#include "comm/shm/greeting.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "base/error.h"
#include "comm/shm/bell.h"

namespace hpcomm::shm {

namespace {

// Read once: later the process may open no more files.
const std::string& own_boot_id() {
  static const std::string& the = *new std::string([] {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string id;
    std::getline(file, id);
    return id;
  }());
  return the;
}

std::string own_network() {
  std::array<char, 64> name{};
  const ssize_t length = ::readlink("/proc/self/ns/net", name.data(), name.size());
  return {name.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

std::string allowed_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) {  // a host with more cores than the set has places
    return std::string(std::max(1U, std::thread::hardware_concurrency()), '1');
  }
  std::string cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    cores += CPU_ISSET(core, &allowed) ? '1' : '0';
  }
  return cores.substr(0, cores.find_last_of('1') + 1);
}

// Fields with their lengths before them: what is in them does not matter.
class Writer {
 public:
  void operator()(const std::string& field) { put(field.data(), field.size()); }
  template <typename Plain>
  void operator()(const Plain& field) {
    put(&field, sizeof field);
  }
  [[nodiscard]] std::string take() { return std::move(body_); }

 private:
  void put(const void* data, std::size_t bytes) {
    const auto length = static_cast<std::uint32_t>(bytes);
    body_.append(reinterpret_cast<const char*>(&length), sizeof length);
    body_.append(static_cast<const char*>(data), bytes);
  }

  std::string body_;
};

class Reader {
 public:
  explicit Reader(const std::string& body) : body_(body) {}

  void operator()(std::string& field) { field = take(); }
  template <typename Plain>
  void operator()(Plain& field) {
    const std::string bytes = take();
    require(bytes.size() == sizeof field);
    std::memcpy(&field, bytes.data(), sizeof field);
  }
  void require_end() const { require(at_ == body_.size()); }

 private:
  static void require(bool fits) {
    if (!fits) {
      throw Error(ErrorKind::kProtocol, "greets its neighbours in another version");
    }
  }
  std::string take() {
    std::uint32_t length = 0;
    require(body_.size() - at_ >= sizeof length);
    std::memcpy(&length, body_.data() + at_, sizeof length);
    at_ += sizeof length;
    require(body_.size() - at_ >= length);
    at_ += length;
    return body_.substr(at_ - length, length);
  }

  const std::string& body_;
  std::size_t at_ = 0;
};

// In the order of the wire.
template <typename Greeting, typename Visit>
void visit_fields(Greeting& greeting, Visit& visit) {
  visit(greeting.boot_id);
  visit(greeting.network);
  visit(greeting.host);
  visit(greeting.cores);
  visit(greeting.scheduler_group);
  visit(greeting.courier);
  visit(greeting.key_word);
  visit(greeting.page);
  visit(greeting.obstacle);
  visit(greeting.process);
  visit(greeting.mark_address);
  visit(greeting.mark);
}

}  // namespace

Greeting Greeting::from_here(std::string host) {
  Greeting greeting;
  greeting.boot_id = own_boot_id();
  greeting.network = own_network();
  greeting.host = std::move(host);
  greeting.cores = allowed_cores();
  greeting.scheduler_group = shm::scheduler_group();
  return greeting;
}

std::string Greeting::encode() const {
  Writer writer;
  visit_fields(*this, writer);
  return writer.take();
}

Greeting Greeting::decode(const std::string& body) {
  Greeting greeting;
  Reader reader(body);
  visit_fields(greeting, reader);
  reader.require_end();
  return greeting;
}

}  // namespace hpcomm::shm
