// ThreadCommunicator: a transport whose ranks are threads of one process, with the rules that are hardest to satisfy.
//
// Nothing is buffered, as on NCCL: a send ends when its receiver has taken it, a collective when all ranks have joined.
// Operations that do not fit together fail on all ranks. Seeded delays shake the order in which ranks arrive.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/host_communicator.h"
#include "control/control.h"
#include "native/check.h"
#include "pack/reduce.h"

namespace hpcomm::testing {

// A deadline for what ends at once unless it is broken.
inline Deadline soon() { return Clock::now() + std::chrono::seconds(20); }

using std::chrono::milliseconds;

// Runs body(0) ... body(size - 1), each in a thread of its own. An exception that leaves one fails the test.
template <typename Body>
void run_ranks(int size, const Body& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([rank, &body] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        check::fail(__FILE__, __LINE__, str("rank ", rank, " threw: ", error.what()));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// The ports of a job whose ranks are all in this process, open from the start on.
struct Listeners {
  explicit Listeners(int size) {
    for (int rank = 0; rank < size; ++rank) {
      of_rank.push_back(std::make_unique<ControlListener>("127.0.0.1", rank, size, control::JobToken{7}));
      addresses.push_back(of_rank.back()->address());
    }
  }
  [[nodiscard]] std::shared_ptr<Control> connect(int rank, Deadline deadline,
                                                 milliseconds heartbeat = kHeartbeatLimit) const {
    return of_rank[static_cast<std::size_t>(rank)]->connect(addresses, deadline, heartbeat);
  }

  std::vector<std::unique_ptr<ControlListener>> of_rank;
  std::vector<std::string> addresses;
};

// The Controls of a job whose ranks are all in this process, over real sockets.
inline std::vector<std::shared_ptr<Control>> connect_controls(int size, milliseconds heartbeat = kHeartbeatLimit) {
  const Listeners job(size);
  std::vector<std::shared_ptr<Control>> controls(static_cast<std::size_t>(size));
  run_ranks(size, [&](int rank) {
    controls[static_cast<std::size_t>(rank)] = job.connect(rank, Clock::now() + std::chrono::seconds(20), heartbeat);
  });
  return controls;
}

// Where the members of one communicator meet. Everything is done under its mutex, which makes the memory of a rank
// that leaves early safe: it takes its buffers back before it goes.
class Room {
 public:
  explicit Room(int size) : posts_(static_cast<std::size_t>(size)) {}

  struct Post {
    std::string what;  // has to be equal on all ranks
    BufferView output;
    BufferView input;
  };

  // Meets all others, calls compute(posts) with everybody's buffers in place, and meets them again. Until all are there
  // a rank may leave; from then on nobody waits for anything but the others' share of the work.
  template <typename Compute, typename Wait>
  void meet(int rank, Post post, const Compute& compute, const Wait& wait) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return leaving_ == 0; });  // of the round before this one
    require_whole();
    posts_[static_cast<std::size_t>(rank)] = std::move(post);
    ++arrived_;
    changed_.notify_all();
    const std::size_t round = round_;
    const auto complete = [&] { return arrived_ == posts_.size() || round_ != round; };
    try {
      wait(lock, changed_, complete);
    } catch (...) {
      if (!complete()) {
        --arrived_;
        throw;
      }
    }
    std::exception_ptr failure;  // the same on all ranks; thrown when nobody reads anybody's buffers any more
    try {
      require_equal();
      compute(posts_);
    } catch (...) {
      failure = std::current_exception();
      broken_ = true;
    }
    if (++computed_ == posts_.size()) {
      arrived_ = 0;
      computed_ = 0;
      leaving_ = posts_.size();
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
    --leaving_;
    changed_.notify_all();
    if (failure != nullptr) {
      std::rethrow_exception(failure);
    }
  }

  template <typename Wait>
  void send(int from, int to, const BufferView& buffer, const Wait& wait) {
    std::unique_lock lock(mutex_);
    Letter letter{buffer, false, false};
    letters_[{from, to}] = &letter;
    changed_.notify_all();
    try {
      wait(lock, changed_, [&] { return letter.taken; });
    } catch (...) {
      letters_.erase({from, to});
      throw;
    }
    letters_.erase({from, to});
    if (letter.unfit) {
      throw Error(ErrorKind::kSchemaMismatch, "the receiver expects another message");
    }
  }

  template <typename Wait>
  void recv(int from, int to, const BufferView& buffer, const Wait& wait) {
    std::unique_lock lock(mutex_);
    const auto waiting = [&]() -> Letter* {
      const auto found = letters_.find({from, to});
      return found == letters_.end() || found->second->taken ? nullptr : found->second;
    };
    wait(lock, changed_, [&] { return waiting() != nullptr; });
    Letter* letter = waiting();
    letter->taken = true;
    letter->unfit = letter->buffer.count != buffer.count || letter->buffer.dtype != buffer.dtype;
    changed_.notify_all();
    if (letter->unfit) {
      throw Error(ErrorKind::kSchemaMismatch, str("expected ", buffer.count, " ", to_string(buffer.dtype), ", got ",
                                                  letter->buffer.count, " ", to_string(letter->buffer.dtype)));
    }
    if (buffer.bytes > 0) {
      std::memcpy(buffer.data, letter->buffer.data, buffer.bytes);
    }
  }

  void wake() {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

 private:
  struct Letter {
    BufferView buffer;
    bool taken = false;
    bool unfit = false;
  };

  void require_whole() const {
    if (broken_) {
      throw Error(ErrorKind::kTransport, "ranks disagreed before: nothing can follow in order");
    }
  }
  void require_equal() const {
    for (const Post& post : posts_) {
      if (post.what != posts_.front().what) {
        throw Error(ErrorKind::kSchemaMismatch, str("ranks disagree: ", post.what, " and ", posts_.front().what));
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Post> posts_;
  std::size_t arrived_ = 0;
  std::size_t computed_ = 0;
  std::size_t leaving_ = 0;
  std::size_t round_ = 0;
  bool broken_ = false;
  std::map<std::pair<int, int>, Letter*> letters_;  // at most one per pair: lanes run one operation at a time
};

// All Rooms of a job, by the name of the communicator.
class Hub {
 public:
  explicit Hub(unsigned seed) : seed_(seed) {}
  std::shared_ptr<Room> room(const std::string& name, int size) {
    const std::lock_guard lock(mutex_);
    auto& room = rooms_[name];
    if (room == nullptr) {
      room = std::make_shared<Room>(size);
    }
    return room;
  }
  [[nodiscard]] unsigned seed() const noexcept { return seed_; }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Room>> rooms_;
  unsigned seed_;
};

class ThreadCommunicator final : public HostCommunicator {
 public:
  ThreadCommunicator(CommunicatorConfig members, std::shared_ptr<Hub> hub)
      : HostCommunicator(std::move(members)),
        hub_(std::move(hub)),
        room_(hub_->room(name(), size())),
        random_(hub_->seed() + static_cast<unsigned>(rank()) * 7919U) {
    watch_peers();
  }
  ~ThreadCommunicator() override { shut_down(); }

  [[nodiscard]] const char* transport() const noexcept override { return "thread"; }
  // 0 unless a test says otherwise, on all ranks.
  [[nodiscard]] std::size_t bytes_in_control() const noexcept override { return bytes_in_control_; }
  void carry_in_control(std::size_t bytes) { bytes_in_control_ = bytes; }

 protected:
  [[nodiscard]] std::shared_ptr<Communicator> make_child(CommunicatorConfig child) override {
    return std::make_shared<ThreadCommunicator>(std::move(child), hub_);
  }

  void interrupt() noexcept override { room_->wake(); }

  void execute(const Operation& operation, Deadline deadline) override {
    if (random_() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
    }
    const auto wait = [&](std::unique_lock<std::mutex>& lock, std::condition_variable& changed, auto until) {
      const auto enough = [&] { return until() || aborted().has_value(); };
      if (!changed.wait_until(lock, deadline, enough)) {
        const char* what = operation_name(operation.kind);
        throw Error(ErrorKind::kTimedOut, str(what, " #", operation.sequence, " on lane ", lane(), " ran out of time"),
                    context(what, operation.peer, operation.sequence));
      }
      if (auto why = aborted()) {
        throw Error(*why);
      }
    };
    if (operation.kind == Operation::Kind::kSend) {
      room_->send(rank(), operation.peer, operation.input, wait);
    } else if (operation.kind == Operation::Kind::kRecv) {
      room_->recv(operation.peer, rank(), operation.output, wait);
    } else if (operation.kind == Operation::Kind::kSendRecv) {
      std::exception_ptr error;
      std::thread sender([&] {
        try {
          room_->send(rank(), operation.peer, operation.input, wait);
        } catch (...) {
          error = std::current_exception();
        }
      });
      const Joined joined(sender);
      room_->recv(operation.source, rank(), operation.output, wait);
      joined.now();
      if (error != nullptr) {
        std::rethrow_exception(error);
      }
    } else {
      collective(operation, wait);
    }
  }

 private:
  // Joins a thread, at the latest when an exception passes.
  class Joined {
   public:
    explicit Joined(std::thread& thread) : thread_(thread) {}
    ~Joined() { now(); }
    Joined(const Joined&) = delete;
    Joined& operator=(const Joined&) = delete;
    void now() const {
      if (thread_.joinable()) {
        thread_.join();
      }
    }

   private:
    std::thread& thread_;
  };

  template <typename Wait>
  void collective(const Operation& operation, const Wait& wait) {
    Room::Post post;
    post.what = str(operation_name(operation.kind), " #", operation.sequence, ", ", operation.input.count, " ",
                    to_string(operation.input.dtype), " of ", operation.input.bytes, " bytes, ",
                    to_string(operation.op), ", root ", operation.peer);
    post.output = operation.output;
    post.input = operation.input;
    std::string result(operation.output.bytes, '\0');
    room_->meet(rank(), post, [&](const std::vector<Room::Post>& posts) { compute(operation, posts, result); }, wait);
    if (!result.empty()) {  // memcpy must not see null, not even for nothing
      std::memcpy(operation.output.data, result.data(), result.size());
    }
  }

  void compute(const Operation& operation, const std::vector<Room::Post>& posts, std::string& result) const {
    const std::size_t part = operation.input.bytes / posts.size();
    const auto me = static_cast<std::size_t>(rank());
    const auto put = [&](std::size_t at, const void* data, std::size_t bytes) {
      if (bytes > 0) {
        std::memcpy(result.data() + at, data, bytes);
      }
    };
    switch (operation.kind) {
      case Operation::Kind::kAllReduce:
        reduce(operation, posts, 0, result);
        break;
      case Operation::Kind::kReduceScatter:
        reduce(operation, posts, me * part, result);
        break;
      case Operation::Kind::kAllGather:
        for (std::size_t r = 0; r < posts.size(); ++r) {
          put(r * operation.input.bytes, posts[r].input.data, operation.input.bytes);
        }
        break;
      case Operation::Kind::kBroadcast:
        put(0, posts[static_cast<std::size_t>(operation.peer)].input.data, operation.input.bytes);
        break;
      case Operation::Kind::kAllToAll:
        for (std::size_t r = 0; r < posts.size(); ++r) {
          put(r * part, static_cast<const char*>(posts[r].input.data) + me * part, part);
        }
        break;
      case Operation::Kind::kSend:
      case Operation::Kind::kRecv:
      case Operation::Kind::kSendRecv:
      case Operation::Kind::kBarrier:
        break;
    }
  }

  static void reduce(const Operation& operation, const std::vector<Room::Post>& posts, std::size_t at,
                     std::string& result) {
    switch (operation.input.dtype) {
      case DType::kFloat32:
        return reduce_as<float>(operation.op, posts, at, result);
      case DType::kFloat64:
        return reduce_as<double>(operation.op, posts, at, result);
      case DType::kInt64:
        return reduce_as<std::int64_t>(operation.op, posts, at, result);
      case DType::kFloat16:
      case DType::kBFloat16: {
        std::vector<const void*> sources;
        for (const Room::Post& post : posts) {
          sources.push_back(static_cast<const char*>(post.input.data) + at);
        }
        return reduce_cpu(result.data(), sources, result.size() / 2, operation.input.dtype, operation.op);
      }
      default:
        throw Error(ErrorKind::kInvalidArgument, str("no reduction of ", to_string(operation.input.dtype)));
    }
  }

  // In rank order: ((r0 + r1) + r2) + ...
  template <typename T>
  static void reduce_as(ReduceOp op, const std::vector<Room::Post>& posts, std::size_t at, std::string& result) {
    std::vector<T> total(result.size() / sizeof(T));
    std::vector<T> next(total.size());
    for (std::size_t r = 0; r < posts.size() && !total.empty(); ++r) {
      auto& into = r == 0 ? total : next;
      std::memcpy(into.data(), static_cast<const char*>(posts[r].input.data) + at, result.size());
      for (std::size_t i = 0; r > 0 && i < total.size(); ++i) {
        switch (op) {
          case ReduceOp::kSum:
          case ReduceOp::kAverage:
            total[i] += next[i];
            break;
          case ReduceOp::kProduct:
            total[i] *= next[i];
            break;
          case ReduceOp::kMin:
            total[i] = std::min(total[i], next[i]);
            break;
          case ReduceOp::kMax:
            total[i] = std::max(total[i], next[i]);
            break;
          case ReduceOp::kBitAnd:
          case ReduceOp::kBitOr:
          case ReduceOp::kBitXor:
            throw Error(ErrorKind::kInvalidArgument, str("no reduction ", to_string(op)));
        }
      }
    }
    if (op == ReduceOp::kAverage) {
      for (T& value : total) {
        value /= static_cast<T>(posts.size());
      }
    }
    if (!total.empty()) {
      std::memcpy(result.data(), total.data(), result.size());
    }
  }

  std::size_t bytes_in_control_ = 0;
  std::shared_ptr<Hub> hub_;
  std::shared_ptr<Room> room_;
  std::mt19937 random_;  // used on the lane only
};

// A job whose ranks are threads: real Controls over loopback, and a world communicator per rank.
class ThreadJob {
 public:
  explicit ThreadJob(int size, unsigned seed = 1, milliseconds timeout = milliseconds(20000))
      : size_(size), timeout_(timeout), hub_(std::make_shared<Hub>(seed)), controls_(connect_controls(size)) {}

  // This rank's end of the communicator `name`, on a worker of its own.
  [[nodiscard]] std::shared_ptr<Communicator> communicator(int rank, const std::string& name = "world") const {
    CommunicatorConfig config;
    config.name = name;
    for (int r = 0; r < size_; ++r) {
      config.ranks.push_back(r);
    }
    config.rank = rank;
    config.lane = name;
    config.stream = make_worker_stream(name);
    config.control = controls_[static_cast<std::size_t>(rank)];
    config.timeout = timeout_;
    return std::make_shared<ThreadCommunicator>(std::move(config), hub_);
  }
  [[nodiscard]] const std::shared_ptr<Control>& control(int rank) const {
    return controls_[static_cast<std::size_t>(rank)];
  }

  // Runs body(world communicator) on every rank. A rank that throws fails the test and ends the others.
  template <typename Body>
  void run(const Body& body) const {
    run_ranks(size_, [&](int rank) {
      try {
        body(communicator(rank));
      } catch (const std::exception& error) {
        control(rank)->abort(error.what());
        throw;
      }
    });
  }

 private:
  int size_;
  milliseconds timeout_;
  std::shared_ptr<Hub> hub_;
  std::vector<std::shared_ptr<Control>> controls_;
};

// Heap memory; counts what it handed out, and fills it with a pattern so that nobody relies on zeros.
class HeapAllocator final : public Allocator {
 public:
  Buffer allocate(std::size_t bytes) override {
    ++allocations;
    void* data = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::memset(data, 0xee, bytes);
    return {{data, bytes, bytes, DType::kUInt8, {}}, Keepalive(data, std::free)};
  }
  std::atomic<int> allocations = 0;
};

// Whether `condition` comes true within a generous bound; polls.
template <typename Condition>
bool eventually(const Condition& condition, milliseconds limit = milliseconds(20000)) {
  const Deadline deadline = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() >= deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

template <typename T>
BufferView view_of(std::vector<T>& values, DType dtype) {
  return {values.data(), values.size() * sizeof(T), values.size(), dtype, {}};
}
inline BufferView view_of(std::vector<float>& values) { return view_of(values, DType::kFloat32); }
inline BufferView view_of(std::vector<double>& values) { return view_of(values, DType::kFloat64); }
inline BufferView view_of(std::vector<std::int64_t>& values) { return view_of(values, DType::kInt64); }

// stderr of the process while this lives, and what was written to it.
class CapturedStderr {
 public:
  CapturedStderr() : file_(std::tmpfile()) {
    std::fflush(stderr);
    saved_ = ::dup(STDERR_FILENO);
    ::dup2(::fileno(file_), STDERR_FILENO);
  }
  ~CapturedStderr() { (void)text(); }
  std::string text() {
    if (saved_ >= 0) {
      std::fflush(stderr);
      ::dup2(saved_, STDERR_FILENO);
      ::close(saved_);
      saved_ = -1;
      std::rewind(file_);
      std::array<char, 4096> chunk{};
      for (std::size_t got = 0; (got = std::fread(chunk.data(), 1, chunk.size(), file_)) > 0;) {
        text_.append(chunk.data(), got);
      }
      std::fclose(file_);
    }
    return text_;
  }

 private:
  std::FILE* file_;
  int saved_ = -1;
  std::string text_;
};

// The error of a Work, or nothing.
inline std::optional<Error> error_of(const Work& work) {
  try {
    if (!work.wait_until(Clock::now() + std::chrono::seconds(20))) {
      return Error(ErrorKind::kInternal, "the Work did not end within 20 s");
    }
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

}  // namespace hpcomm::testing
