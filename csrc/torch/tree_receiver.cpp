// Receiving trees. Whoever receives without a limit does it itself, in the edge's order; a message that nobody was
// given stays in line.
#include "torch/tree_receiver.h"

#include <memory>
#include <utility>

#include "base/error.h"
#include "comm/communicator_allocator.h"
#include "comm/waiting.h"
#include "engine/structure.h"
#include "torch/bindings.h"
#include "torch/gil.h"
#include "torch/message_tensors.h"
#include "torch/tensor.h"
#include "torch/tree.h"
#include "torch/waiting.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

constexpr auto kSignalPoll = std::chrono::milliseconds(20);
// Who limits a wait itself may wait again, for as long as the program likes: the receipt behind it has no end.
constexpr auto kForever = std::chrono::hours(24 * 365);
// A wait without a limit ends with its receipt, at the time-out of the communicator. Or that has none, or waits its
// turn behind one that has none: then it ends by itself, so much later.
constexpr auto kGrace = std::chrono::seconds(1);

// On CPU from torch, because shared memory is for what others read or write; on a GPU what the transport can write into
// at once.
std::shared_ptr<Allocator> receive_allocator(const std::shared_ptr<Communicator>& communicator) {
  if (communicator->device().type == DeviceType::kCpu) {
    return make_torch_allocator();
  }
  return std::make_shared<CommunicatorAllocator>(communicator);
}

py::object build(const KnownSchema& known, MessageTensors& tensors) {
  const std::string& structure = known.schema.structure;
  return known.summary ? unflatten(structure, known.summary->tensors, tensors.release())
                       : unflatten(structure, tensors.release());  // throws, with the reason
}

py::object to_tree(const Incoming& message) {
  MessageTensors tensors(message.known, message.device);
  tensors.set_memory(message);
  return build(*message.known, tensors);
}

// The tree of a message, made as soon as its schema is known.
class Draft {
 public:
  Draft(const KnownPtr& known, Device device) : tensors_(known, device), tree_(build(*known, tensors_)) {}
  // False when this cannot be the tree of a message of schema `known`. Needs no GIL, as set_memory().
  [[nodiscard]] bool become(const KnownPtr& known) { return tensors_.become(known); }
  void set_memory(const Incoming& message) { tensors_.set_memory(message); }
  [[nodiscard]] py::object take() { return std::move(tree_); }

 private:
  MessageTensors tensors_;
  py::object tree_;
};

// The tree of a message that is being received: drafted like the last one while nothing has come, which takes as long
// as the way of a small message, and given other shapes if it has others; else made while its sender packs; else in the
// end.
class Drafting {
 public:
  explicit Drafting(Device device) : device_(device) {}

  // Without the GIL, as is placed().
  void idle(const KnownPtr& known) {
    const WithGil gil;
    make(known);
  }
  void placed(const Incoming& message) {
    if (!draft_ || !draft_->become(message.known)) {
      const WithGil gil;
      draft_.reset();
      make(message.known);
    }
    if (draft_) {
      draft_->set_memory(message);
      has_memory_ = true;
    }
  }

  // With the GIL, once the message has come.
  [[nodiscard]] py::object finish(const Incoming& message) {
    if (!has_memory_ && draft_ && draft_->become(message.known)) {
      draft_->set_memory(message);
      has_memory_ = true;
    }
    if (!has_memory_) {
      return to_tree(message);
    }
    py::object tree = draft_->take();
    draft_.reset();
    return tree;
  }

 private:
  void make(const KnownPtr& known) {
    try {
      // The fields of a dataclass may be set by code of the program, which may read them.
      if (known->summary && !known->summary->has_dataclass) {
        draft_.emplace(known, device_);
      }
    } catch (const Error&) {
      // finish() finds it again.
    }  // what else there is, is the program's: a signal, most likely
  }

  const Device device_;
  std::optional<Draft> draft_;
  bool has_memory_ = false;
};

// They pass through an edge as any error of the program does. The edge that waits is not the one that was refused; and
// what did not come in time may come in the next call.
struct Refused {
  Error why;
};
struct Expired {};

// As wait_for(), but on a CPU not for ever. Calls `look` meanwhile.
void wait_for_receipt(const Work& work, double seconds, std::chrono::milliseconds limit,
                      const std::function<void()>& look = nullptr) {
  work.require_parent();
  const Waiting waiting(work.what());
  if (work.device().type == DeviceType::kCpu && seconds < 0 && !work.done() &&
      !wait_in_slices(
          deadline_after(limit + kGrace),
          [&](Deadline until) {
            if (look != nullptr) {
              look();
            }
            return work.wait_until(until);
          })) {
    throw Error(ErrorKind::kTimedOut,
                str("recv #", work.what().sequence, ": no message came within ", limit.count() / 1000.0,
                    " s; is the peer still computing? The next call goes on with it"),
                work.what());
  }
  wait_for(work, seconds);
}

bool has_failed(const Work& work) {
  try {
    (void)work.wait_until({});
    return false;
  } catch (...) {
    return true;
  }
}

// check_signals() without taking the GIL, for who has it: once a message.
void raise_signals() {
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

}  // namespace

// A call of take() that this thread is in, and the one around it.
class TreeReceiver::Taking {
 public:
  // `sent` and `microbatch` where an answer is awaited.
  explicit Taking(TreeReceiver& receiver, Deadline deadline = Deadline::max(), const SendEdge* sent = nullptr,
                  int microbatch = -1)
      : receiver_(receiver),
        deadline_(deadline),
        sent_(sent),
        microbatch_(microbatch),
        outer_(innermost_),
        waiting_(this, &words) {
    receiver.require_outside();
    innermost_ = this;
  }
  ~Taking() { innermost_ = outer_; }
  Taking(const Taking&) = delete;
  Taking& operator=(const Taking&) = delete;

  static bool is_within(const TreeReceiver& receiver) noexcept {
    const Taking* taking = innermost_;
    while (taking != nullptr && &taking->receiver_ != &receiver) {
      taking = taking->outer_;
    }
    return taking != nullptr;
  }
  // For the innermost call of this thread, while it waits, without the GIL. Throws Refused.
  static void check_answered() {
    const Taking* const taking = innermost_;
    if (taking == nullptr || taking->sent_ == nullptr) {
      return;
    }
    try {
      taking->sent_->check_refused(taking->microbatch_);
    } catch (const Error& why) {
      taking->receiver_.end_with(why, taking->microbatch_);
      throw Refused{why};
    }
  }
  // Throws Expired as well, and what a signal's handler raised.
  static void poll() {
    check_answered();
    if (innermost_ != nullptr && Clock::now() >= innermost_->deadline_) {
      throw Expired{};
    }
    check_signals();
  }

 private:
  static std::string words(const void* about) {
    const auto& taking = *static_cast<const Taking*>(about);
    const std::string message = str("recv of ", taking.receiver_.edge_name());
    return taking.microbatch_ < 0 ? message : str(message, ", microbatch ", taking.microbatch_);
  }

  TreeReceiver& receiver_;
  const Deadline deadline_;
  const SendEdge* const sent_;
  const int microbatch_;
  const Taking* const outer_;
  const Waiting waiting_;
  static thread_local const Taking* innermost_;
};

thread_local const TreeReceiver::Taking* TreeReceiver::Taking::innermost_ = nullptr;

TreeReceiver::TreeReceiver(EdgeConfig config) : edge_(config, receive_allocator(config.communicator)) {}

void TreeReceiver::require_outside() const {
  HPCOMM_REQUIRE(!Taking::is_within(*this),
                 "recv was called by a signal handler while a recv of this channel waits in ",
                 "the same thread; set a flag in the handler and receive afterwards");
}

PendingTree TreeReceiver::recv(int microbatch) {
  const Taking taking(*this);
  return {issue(microbatch, in_seconds(-1), {}), shared_from_this()};
}

PendingTree::PendingTree(Receipt receipt, const std::shared_ptr<TreeReceiver>& receiver)
    : receipt_(std::move(receipt)),
      receiver_(receiver),
      edge_name_(receiver->edge_name()),
      limit_(receiver->edge_timeout()) {}

py::object PendingTree::wait(double timeout) const {
  wait_for_receipt(*receipt_.work, timeout, limit_);
  try {
    return to_tree(*receipt_.message);
  } catch (const Error& why) {
    const auto receiver = receiver_.lock();
    // Without an edge there is no direction to end.
    throw receiver == nullptr ? Error(why.kind(), str(edge_name_, ": ", why.what()), receipt_.work->what())
                              : receiver->refusal_of(receipt_, why);
  }
}

Receipt TreeReceiver::issue(int microbatch, Deadline deadline, std::chrono::milliseconds patience) {
  if (auto late = first_overdue()) {
    return *late;
  }
  const WithoutGil scope;
  const auto turn = take_turn(deadline);
  OpOptions options;
  options.poll = Taking::poll;  // for a GPU, where the host waits for the header
  options.timeout = patience;
  return edge_.recv(microbatch, options);
}

py::object TreeReceiver::take(int microbatch, double timeout) { return take(microbatch, timeout, nullptr); }

py::object TreeReceiver::take_answer(int microbatch, const SendEdge& sent) {
  try {
    return take(microbatch, -1, &sent);
  } catch (const Refused& refused) {
    throw Error(refused.why);
  } catch (const Error&) {
    // Who refused it may have left since, or have ended the job: that is not why no answer comes.
    const WithoutGil scope;
    try {
      sent.check_refused(microbatch);
    } catch (const Error& why) {
      end_with(why, microbatch);
      throw;
    }
    throw;
  }
}

void TreeReceiver::end_with(const Error& why, int microbatch) {
  edge_.refuse(Error(why.kind(), str(edge_.name(), " ended with what it answers: ", why.what()), why.context()),
               microbatch);
}

py::object TreeReceiver::take(int microbatch, double timeout, const SendEdge* sent) {
  const Deadline deadline = in_seconds(timeout);
  const Taking taking(*this, deadline, sent, microbatch);
  if (timeout >= 0 || !overdue_.empty()) {
    std::optional<Receipt> receipt;
    try {
      receipt = issue(microbatch, deadline, timeout >= 0 ? kForever : std::chrono::milliseconds(0));
    } catch (const Expired&) {
      throw Error(ErrorKind::kTimedOut, str(edge_.name(), ": no message came within ", timeout, " s"));
    }
    wait(*receipt, timeout, deadline);
    return hand_over(*receipt, [&] { return to_tree(*receipt->message); });
  }
  Drafting drafting(edge_.device());
  Receipt receipt;
  {
    const WithoutGil scope;
    auto turn = take_turn(deadline);
    OpOptions options;
    options.inline_when_idle = !is_shared_;
    options.wants_work = false;
    options.poll = Taking::poll;
    receipt = edge_.recv(microbatch, options,
                         {[&](const KnownPtr& known) { drafting.idle(known); },
                          [&](const Incoming& message) { drafting.placed(message); }, [&turn] { turn.unlock(); }});
  }
  wait(receipt, -1, {});
  return hand_over(receipt, [&] { return drafting.finish(*receipt.message); });
}

Error TreeReceiver::refusal_of(const Receipt& receipt, const Error& why) {
  if (why.kind() != ErrorKind::kSchemaMismatch && why.kind() != ErrorKind::kProtocol) {
    return why;
  }
  const ErrorContext what = receipt.work != nullptr
                                ? receipt.work->what()
                                : ErrorContext{-1, -1, static_cast<long long>(receipt.sequence), "recv"};
  const std::string name = message_name(edge_.name(), receipt.sequence, receipt.message->microbatch);
  Error error(why.kind(), str(name, ": ", why.what()), what);
  const WithoutGil scope;
  edge_.refuse(error, receipt.message->microbatch);
  return error;
}

void TreeReceiver::expect(const py::object& tree) {
  const FlatTree flat = flatten(tree);
  auto schema = std::make_shared<Schema>();
  schema->structure = flat.structure;
  for (std::size_t i = 0; i < flat.leaves.size(); ++i) {
    schema->tensors.push_back({dtype_of_leaf(flat, i), false, flat.tensor(i).sizes().vec(), std::nullopt});
  }
  edge_.expect(std::move(schema));
}

std::unique_lock<std::timed_mutex> TreeReceiver::take_turn(Deadline deadline) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  while (!lock.owns_lock() && !lock.try_lock_for(kSignalPoll)) {
    is_shared_ = true;
    if (Clock::now() >= deadline) {
      throw Error(ErrorKind::kTimedOut,
                  "recv: the message before this one, which another thread receives, did not come");
    }
    Taking::poll();
  }
  return lock;
}

void TreeReceiver::wait(const Receipt& receipt, double seconds, Deadline deadline) {
  try {
    if (receipt.work != nullptr && seconds < 0) {
      wait_for_receipt(*receipt.work, seconds, edge_.timeout(), [] { Taking::check_answered(); });
    } else if (receipt.work != nullptr &&
               !wait_in_slices(deadline, [&](Deadline until) { return receipt.work->wait_until(until); })) {
      const ErrorContext& what = receipt.work->what();
      throw Error(ErrorKind::kTimedOut, str("recv #", what.sequence, " has not ended after ", seconds, " s"), what);
    }
  } catch (...) {
    keep(receipt);
    throw;
  }
}

// Who is interrupted on the way out would lose the message, so signals are looked at once more when all is made, and
// what it was made with is gone: nothing takes long from there on.
template <class Make>
py::object TreeReceiver::hand_over(const Receipt& receipt, const Make& make) {
  try {
    py::object tree = make();
    raise_signals();
    return tree;
  } catch (const Error& why) {
    throw refusal_of(receipt, why);
  } catch (...) {
    keep(receipt);
    throw;
  }
}

// Its place in the line, unless it has failed.
void TreeReceiver::keep(const Receipt& receipt) {
  Receipt kept = receipt;
  if (kept.work == nullptr) {
    kept.work = std::make_shared<DoneWork>(ErrorContext{-1, -1, static_cast<long long>(receipt.sequence), "recv"});
  }
  if (!has_failed(*kept.work)) {  // it may have come just now
    overdue_.emplace(receipt.sequence, std::move(kept));
  }
}

std::optional<Receipt> TreeReceiver::first_overdue() {
  const auto node = overdue_.empty() ? decltype(overdue_)::node_type() : overdue_.extract(overdue_.begin());
  return node.empty() ? std::nullopt : std::optional(std::move(node.mapped()));
}

}  // namespace hpcomm
