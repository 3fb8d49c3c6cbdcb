// Matching of operations, and the movement of data.
#include "native/fake/nccl/clique.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "native/fake/nccl/host.h"

namespace fake_nccl {

namespace {

// Kernels look at the abort flag as often as real ones, more or less.
constexpr std::chrono::microseconds kLook{500};

template <typename Until>
bool wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, const std::atomic<bool>& given_up,
          const Until& until) {
  while (!until()) {
    if (given_up.load(std::memory_order_relaxed)) {
      return false;
    }
    changed.wait_for(lock, kLook);
  }
  return true;
}

void copy(void* target, const void* source, std::size_t bytes) {
  if (bytes > 0 && target != source) {
    std::memmove(target, source, bytes);
  }
}

}  // namespace

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce:
      return "ncclAllReduce";
    case Kind::kReduceScatter:
      return "ncclReduceScatter";
    case Kind::kAllGather:
      return "ncclAllGather";
    case Kind::kBroadcast:
      return "ncclBroadcast";
    case Kind::kSend:
      return "ncclSend";
    case Kind::kRecv:
      return "ncclRecv";
  }
  return "";
}

std::string Operation::text() const {
  return std::string(name_of(kind)) + "(" + std::to_string(count) + " of type " + std::to_string(type) + ", op " +
         std::to_string(op) + ", peer " + std::to_string(peer) + ")";
}

bool Operation::fits(const Operation& other) const {
  const bool same_op = op == other.op || (op >= ncclNumOps && other.op >= ncclNumOps);
  return kind == other.kind && count == other.count && type == other.type && same_op && peer == other.peer;
}

bool Turnstile::enter(std::int64_t ticket, const std::atomic<bool>& given_up) {
  std::unique_lock lock(mutex_);
  return wait(lock, changed_, given_up, [&] { return turn_ == ticket; });
}

void Turnstile::leave(std::int64_t ticket) {
  const std::lock_guard lock(mutex_);
  left_.insert(ticket);
  while (left_.erase(turn_) > 0) {
    ++turn_;
  }
  changed_.notify_all();
}

bool Turnstile::enter_any(const std::atomic<bool>& given_up) {
  std::unique_lock lock(mutex_);
  if (!wait(lock, changed_, given_up, [&] { return !busy_; })) {
    return false;
  }
  busy_ = true;
  return true;
}

void Turnstile::leave_any() {
  const std::lock_guard lock(mutex_);
  busy_ = false;
  changed_.notify_all();
}

std::string Clique::error_text() {
  const std::lock_guard lock(mutex_);
  return text_;
}

void Clique::mismatch(const std::string& text) {
  if (rules().strict && text_.empty()) {
    text_ = text;
    violation(text);
    error = ncclInvalidUsage;
  }
}

void Clique::match(std::pair<int, int> pair) {
  std::deque<Message*>& sends = sends_[pair];
  std::deque<Message*>& receives = receives_[pair];
  while (!sends.empty() && !receives.empty()) {
    const Operation& send = sends.front()->operation;
    const Operation& receive = receives.front()->operation;
    if (send.count != receive.count || send.type != receive.type) {
      mismatch("rank " + std::to_string(pair.first) + " issued " + send.text() + ", rank " +
               std::to_string(pair.second) + " " + receive.text());
      return;
    }
    if (send.registered != receive.registered) {
      violation("rank " + std::to_string(pair.first) + " sends " + (send.registered ? "" : "un") +
                "registered memory to rank " + std::to_string(pair.second) + "'s " + (receive.registered ? "" : "un") +
                "registered memory");
    }
    copy(receive.output, send.input, send.count * size_of(send.type));
    sends.front()->done = true;
    receives.front()->done = true;
    sends.pop_front();
    receives.pop_front();
    changed_.notify_all();
  }
}

void Clique::compute(Round& round) {
  const Operation& first = *round.posts.front();
  for (const auto& post : round.posts) {
    if (post->registered != first.registered) {
      violation("a collective of memory that only some ranks have registered: " + first.text());
      break;
    }
  }
  const std::size_t bytes = first.count * size_of(first.type);
  if (first.kind == Kind::kAllReduce || first.kind == Kind::kReduceScatter) {
    const std::size_t parts = first.kind == Kind::kAllReduce ? 1 : round.posts.size();
    std::vector<Contribution> from;
    for (const auto& post : round.posts) {
      from.push_back({post->input, post->scalar != nullptr ? read_scalar(post->type, post->scalar) : 1.0});
    }
    std::vector<char> result(bytes * parts);
    reduce(first.type, first.op >= ncclNumOps ? ncclSum : first.op, from, first.count * parts, result.data());
    for (std::size_t r = 0; r < round.posts.size(); ++r) {
      copy(round.posts[r]->output, result.data() + (parts == 1 ? 0 : r * bytes), bytes);
    }
    return;
  }
  for (const auto& to : round.posts) {
    if (first.kind == Kind::kBroadcast) {
      copy(to->output, round.posts[static_cast<std::size_t>(first.peer)]->input, bytes);
      continue;
    }
    for (std::size_t r = 0; r < round.posts.size(); ++r) {
      copy(static_cast<char*>(to->output) + r * bytes, round.posts[r]->input, bytes);
    }
  }
}

void Clique::collective(std::unique_lock<std::mutex>& lock, int rank, std::uint64_t index, const Operation& operation,
                        const std::atomic<bool>& aborted) {
  Round& round = rounds_[index];
  round.posts.resize(static_cast<std::size_t>(size));
  round.posts[static_cast<std::size_t>(rank)] = operation;
  if (++round.arrived == size) {
    const auto odd = std::find_if(round.posts.begin(), round.posts.end(),
                                  [&](const auto& post) { return !post->fits(*round.posts.front()); });
    if (odd == round.posts.end()) {
      compute(round);
      round.done = true;
      changed_.notify_all();
    } else {
      mismatch("rank 0 issued " + round.posts.front()->text() + ", rank " + std::to_string(odd - round.posts.begin()) +
               " " + (*odd)->text() + ", both as collective " + std::to_string(index));
    }
  }
  if (!wait(lock, changed_, aborted, [&round] { return round.done; })) {
    round.posts[static_cast<std::size_t>(rank)].reset();
    --round.arrived;  // nobody completes this round any more
    round.arrived -= size;
    return;
  }
  if (++round.left == size) {
    rounds_.erase(index);
  }
}

void Clique::run(int rank, std::uint64_t& collectives, const std::vector<Operation>& operations,
                 const std::atomic<bool>& aborted) {
  std::unique_lock lock(mutex_);
  std::deque<Message> messages;  // stay where they are
  for (const Operation& operation : operations) {
    if (operation.kind == Kind::kSend || operation.kind == Kind::kRecv) {
      messages.push_back({operation, false});
      const bool sends = operation.kind == Kind::kSend;
      const std::pair pair = sends ? std::pair(rank, operation.peer) : std::pair(operation.peer, rank);
      (sends ? sends_ : receives_)[pair].push_back(&messages.back());
      match(pair);
    }
  }
  for (const Operation& operation : operations) {
    if (operation.kind != Kind::kSend && operation.kind != Kind::kRecv) {
      collective(lock, rank, collectives++, operation, aborted);
    }
  }
  const auto all_done = [&messages] {
    return std::all_of(messages.begin(), messages.end(), [](const Message& message) { return message.done; });
  };
  if (!wait(lock, changed_, aborted, all_done)) {
    for (auto* queues : {&sends_, &receives_}) {
      for (auto& [pair, queue] : *queues) {
        std::erase_if(queue, [&messages](const Message* queued) {
          return std::any_of(messages.begin(), messages.end(), [queued](const Message& own) { return &own == queued; });
        });
      }
    }
  }
}

}  // namespace fake_nccl
