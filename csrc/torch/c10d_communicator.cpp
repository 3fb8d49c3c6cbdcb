// Blocking calls on a c10d::Backend that can be interrupted.
#include "torch/c10d_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/absent.h"
#include "comm/agreement.h"
#include "comm/farewell.h"
#include "comm/host_communicator.h"
#include "comm/issued.h"
#include "comm/solo/solo_communicator.h"
#include "pack/reduce.h"
#include "torch/c10d_calls.h"
#include "torch/cpu_transports.h"
#include "torch/tensor.h"

namespace hpcomm {

namespace {

// How long a transport error waits for Control to say which rank is behind it.
constexpr auto kBlameWait = std::chrono::milliseconds(200);
// A receive that is posted when the header has come is answered by the sender's thread before anything travels: four
// changes of threads where Control has two. Measured by `python -m benchmarks.p2p --transport gloo`.
constexpr std::size_t kInControl = std::size_t{1} << 20;
// Of a sum that every rank forms of what all have: two calls of the backend would take longer than the bytes.
constexpr std::size_t kShort = std::size_t{8} << 10;

// Set by a future's callback on the backend's thread.
struct Settled {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

class C10dCommunicator final : public HostCommunicator {
 public:
  C10dCommunicator(CommunicatorConfig config, C10dBackend backend, std::shared_ptr<const CpuTransports> transports)
      : HostCommunicator(std::move(config)), backend_(std::move(backend)), transports_(std::move(transports)) {
    if (checks()) {
      agreement_.emplace(*this);
    }
    HPCOMM_REQUIRE(backend_ != nullptr, "no c10d backend");
    HPCOMM_REQUIRE(backend_->getSize() == size() && backend_->getRank() == rank(), "the c10d backend has rank ",
                   backend_->getRank(), " of ", backend_->getSize(), ", the communicator rank ", rank(), " of ",
                   size());
    watch_peers();
  }

  ~C10dCommunicator() override {
    shut_down();
    if (abandoned_ || forked()) {
      // A thread of the backend still waits for a peer; its destructor would join that thread for as long as the
      // backend's own time-out. The process is about to report an error: let it. A forked child has no such thread.
      (void)backend_.release();
    }
  }

  void close() override {
    HostCommunicator::close();
    if (!forked() && !in_operation()) {
      farewell_.say();
    }
  }

  [[nodiscard]] const char* transport() const noexcept override { return "c10d"; }
  [[nodiscard]] std::size_t bytes_in_control() const noexcept override { return kInControl; }

  // Each message of a group of several waits for the other end's word: all of them at once, not one after the other.
  void group(const std::function<void()>& issue) override {
    if (Group::current != nullptr && Group::current->owner == this) {
      issue();  // a group within a group is part of it
      return;
    }
    Group collected{this, Group::current, {}, {}};
    Group::current = &collected;
    WorkPtr all;
    try {
      issue();
      Group::current = collected.outer;
      all = run_together(std::move(collected.messages));
    } catch (...) {
      Group::current = collected.outer;
      for (const auto& work : collected.works) {
        work->fail(std::current_exception());  // what the caller may hold ends with the same words
      }
      throw;
    }
    for (const auto& work : collected.works) {
      work->issued(all);
    }
  }

 protected:
  WorkPtr submit(Operation operation) override {
    Group* const group = Group::current;
    if (group == nullptr || group->owner != this || !is_message(operation.kind)) {
      return HostCommunicator::submit(std::move(operation));
    }
    operation.options = operation.options.queued();
    group->works.push_back(std::make_shared<RelayWork>(what_of(operation)));
    if (operation.kind == Operation::Kind::kSendRecv) {
      group->messages.push_back(operation.receiving());
      group->messages.push_back(operation.sending());
    } else {
      group->messages.push_back(std::move(operation));
    }
    return group->works.back();
  }

  [[nodiscard]] std::shared_ptr<Communicator> make_child(CommunicatorConfig child) override {
    HPCOMM_REQUIRE(transports_ != nullptr || child.ranks.size() == 1,
                   "this communicator wraps a backend that it did not make and cannot divide it");
    return transports_ != nullptr ? transports_->make(std::move(child)) : make_solo_communicator(std::move(child));
  }

  void execute(const Operation& operation, Deadline deadline) override {
    if (!is_message(operation.kind)) {
      farewell_.note_begun();
    }
    if (agreement_ && !is_message(operation.kind)) {
      if (const auto differs = agreement_->meet(issued_by(operation), deadline, operation.options.poll).front()) {
        throw Error(*differs);
      }
    }
    try {
      switch (operation.kind) {
        case Operation::Kind::kSend:
        case Operation::Kind::kRecv:
          transfer({operation}, deadline);
          return;
        case Operation::Kind::kSendRecv:
          transfer({operation.receiving(), operation.sending()}, deadline);
          return;
        case Operation::Kind::kReduceScatter:
          require_reducible(operation);
          reduce_scatter(operation, deadline);
          return;
        case Operation::Kind::kAllReduce:
          require_reducible(operation);
          if (!is_reduced_by_gloo(operation)) {
            all_reduce_by_parts(operation, deadline);
            return;
          }
          [[fallthrough]];
        case Operation::Kind::kAllGather:
        case Operation::Kind::kBroadcast:
        case Operation::Kind::kAllToAll:
        case Operation::Kind::kBarrier:
          wait_collective(operation, start_collective(*backend_, operation, left_until(deadline)), deadline);
          if (operation.op == ReduceOp::kAverage) {
            at::Tensor sum = as_tensor(operation.output, operation.options.keepalive);
            const bool truncates = c10::isIntegralType(sum.scalar_type(), true);
            sum.div_(size(), truncates ? std::optional<std::string_view>("trunc") : std::nullopt);
          }
          return;
      }
    } catch (const Error&) {
      throw;
    } catch (const c10::Error& error) {
      explain(operation, error.what_without_backtrace(), deadline);
    } catch (const std::exception& error) {
      explain(operation, error.what(), deadline);
    }
  }

  void interrupt() noexcept override {
    std::lock_guard lock(mutex_);
    interrupted_ = true;
    abort_messages();
  }

 private:
  // What a thread collects between the begin and the end of a group.
  struct Group {
    const C10dCommunicator* owner;
    Group* outer;
    std::vector<Operation> messages;
    std::vector<std::shared_ptr<RelayWork>> works;

    static thread_local Group* current;
  };

  // The backend's Work of a message, which can be aborted.
  using Message = c10::intrusive_ptr<c10d::Work>;

  // A millisecond at least: none is no limit for a backend.
  [[nodiscard]] static std::chrono::milliseconds left_until(Deadline deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    return std::max(left, std::chrono::milliseconds(1));
  }

  // Null for an empty message, which is not sent.
  [[nodiscard]] Message begin(const Operation& operation) {
    const bool sends = operation.kind == Operation::Kind::kSend;
    const BufferView& view = sends ? operation.input : operation.output;
    if (view.bytes == 0) {
      return {};
    }
    std::vector<at::Tensor> tensors{as_tensor(view, operation.options.keepalive)};
    return sends ? backend_->send(tensors, operation.peer, 0) : backend_->recv(tensors, operation.peer, 0);
  }

  // Starts those of `messages` that fit, as soon as that is known; the other ends of those know nothing of the rest.
  // Returns what is wrong with the first that does not. Empty messages are not sent, and not compared.
  template <typename Start>
  [[nodiscard]] std::optional<Error> start_fitting(const std::vector<Operation>& messages, Deadline deadline,
                                                   const Start& start) {
    std::vector<Issued> issued;
    std::vector<const Operation*> of;
    for (const Operation& message : messages) {
      for (Issued& end : issued_by(message)) {
        issued.push_back(std::move(end));
        of.push_back(&message);
      }
    }
    std::exception_ptr failed;
    const auto differences = agreement_->meet(issued, deadline, messages.front().options.poll, [&](std::size_t place) {
      try {
        if (failed == nullptr) {
          start(*of[place]);
        }
      } catch (...) {
        failed = std::current_exception();  // of the backend
      }
    });
    if (failed != nullptr) {
      std::rethrow_exception(failed);
    }
    const auto first = std::find_if(differences.begin(), differences.end(), [](const auto& each) { return each; });
    return first == differences.end() ? std::nullopt : *first;
  }

  // Messages of which none waits for another: all are started before one is waited for.
  void transfer(const std::vector<Operation>& messages, Deadline deadline) {
    const bool several = messages.size() > 1;
    const Operation* at = nullptr;
    std::vector<const Operation*> started;
    std::optional<Error> differs;
    forget(false);
    try {
      const auto start = [&](const Operation& message) {
        at = &message;
        hold(begin(message));
        started.push_back(&message);
      };
      if (agreement_) {
        differs = start_fitting(messages, deadline, start);
      } else {
        std::for_each(messages.begin(), messages.end(), start);
      }
      for (std::size_t i = 0; i < started.size(); ++i) {
        at = started[i];
        if (const Message message = held(i)) {
          message->wait(left_until(deadline));
        }
      }
    } catch (const Error&) {
      forget(several);
      throw;
    } catch (const std::exception& error) {
      const auto* const known = dynamic_cast<const c10::Error*>(&error);
      const std::string text = known != nullptr ? known->what_without_backtrace() : error.what();
      forget(several);
      try {
        explain(at != nullptr ? *at : messages.front(), text, deadline);
      } catch (const Error& told) {
        if (several) {
          abort(told);  // the others may be cut in two
        }
        throw;
      }
    }
    forget(false);
    throw_if_aborted(what_of(messages.front()));
    if (differs) {
      throw Error(*differs);
    }
  }

  // Null for none.
  WorkPtr run_together(std::vector<Operation> messages) {
    if (messages.empty()) {
      return nullptr;
    }
    ErrorContext what = what_of(messages.front());
    OpOptions options;
    options.timeout = messages.front().options.timeout;
    return run_in_order(
        std::move(what), [this, all = std::move(messages)](Deadline deadline) { transfer(all, deadline); }, options);
  }

  void hold(Message message) {
    std::lock_guard lock(mutex_);
    if (interrupted_ && message) {
      message->abort();
    }
    transfers_.push_back(std::move(message));
  }

  [[nodiscard]] Message held(std::size_t i) {
    std::lock_guard lock(mutex_);
    return transfers_[i];
  }

  void forget(bool and_abort) {
    std::lock_guard lock(mutex_);
    if (and_abort) {
      abort_messages();
    }
    transfers_.clear();
  }

  // With the mutex held.
  void abort_messages() noexcept {
    for (const Message& message : transfers_) {
      try {
        if (message) {
          message->abort();
        }
      } catch (const std::exception&) {
        // A backend without abort() ends by its own time-out.
      }
    }
  }

  // gloo's reduce_scatter is an all_reduce. Here every rank is sent its own part by all others, half as many bytes, and
  // reduces it in rank order.
  void reduce_scatter(const Operation& operation, Deadline deadline) {
    if (operation.output.count > 0) {
      reduce_part(operation, operation.output, as_tensor(operation.input, operation.options.keepalive), deadline);
    }
  }

  // Every rank reduces a part, and all gather these: as many bytes as an all_reduce. Short ones all gather, and reduce
  // themselves.
  void all_reduce_by_parts(const Operation& operation, Deadline deadline) {
    const BufferView& buffer = operation.output;
    if (buffer.count == 0) {
      return;
    }
    const auto ranks = static_cast<std::size_t>(size());
    const std::size_t each = (buffer.count + ranks - 1) / ranks;
    const auto count = static_cast<std::int64_t>(buffer.count);
    at::Tensor whole = as_tensor(buffer, operation.options.keepalive);
    if (buffer.bytes <= kShort) {
      const at::Tensor all = at::empty({size() * count}, whole.options());
      gather(operation, all, whole, deadline);
      return reduce(operation, buffer, all);
    }
    const bool is_even = each * ranks == buffer.count;
    at::Tensor padded = is_even ? whole : at::zeros({static_cast<std::int64_t>(each * ranks)}, whole.options());
    if (!is_even) {
      padded.narrow(0, 0, count).copy_(whole);
    }
    const at::Tensor own = parts(padded, size())[static_cast<std::size_t>(rank())];
    reduce_part(operation, {own.data_ptr(), own.nbytes(), each, buffer.dtype, buffer.device}, padded, deadline);
    gather(operation, padded, own, deadline);
    if (!is_even) {
      whole.copy_(padded.narrow(0, 0, count));
    }
  }

  // This rank's of as many equal parts of `all` as there are ranks, reduced, to `output`, which may be that part.
  void reduce_part(const Operation& operation, const BufferView& output, at::Tensor all, Deadline deadline) {
    at::Tensor sent = all.view(at::kByte);  // which every backend takes
    at::Tensor received = at::empty_like(sent);
    c10d::AllToAllOptions options;
    options.timeout = left_until(deadline);
    std::vector<std::int64_t> even;
    wait_collective(operation, backend_->alltoall_base(received, sent, even, even, options), deadline);
    reduce(operation, output, received);
  }

  // `own` of all ranks, in their order, to `all`.
  void gather(const Operation& operation, const at::Tensor& all, const at::Tensor& own, Deadline deadline) {
    c10d::AllgatherOptions options;
    options.timeout = left_until(deadline);
    std::vector<std::vector<at::Tensor>> outputs{parts(all.view(at::kByte), size())};
    std::vector<at::Tensor> inputs{own.view(at::kByte)};
    wait_collective(operation, backend_->allgather(outputs, inputs, options), deadline);
  }

  // The parts of `all`, one of each rank, to `output`.
  void reduce(const Operation& operation, const BufferView& output, const at::Tensor& all) const {
    std::vector<const void*> sources;
    for (const at::Tensor& part : parts(all, size())) {
      sources.push_back(part.const_data_ptr());
    }
    reduce_cpu(output.data, sources, output.count, output.dtype, operation.op);
  }

  // A rank that closed its Control and lives on takes part in nothing more, but keeps gloo's connections open.
  void watch_departures(const Operation& operation) {
    if (const std::optional<int> gone = farewell_.missing()) {
      abandoned_ = true;
      fail_without(*gone, operation);
    }
  }

  [[noreturn]] void fail_without(int gone, const Operation& operation) {
    ErrorContext what = what_of(operation);
    what.peer = gone;
    const Error error(ErrorKind::kRankFailed, str(title_of(what, lane()), ": ", control().departure_of(gone)), what);
    abort(error);
    throw error;
  }

  // The backend may still finish it one day, or has closed the pair: nothing can follow in order.
  [[noreturn]] void fail_late(const Operation& operation, const std::string& more) {
    ErrorContext what = what_of(operation);
    const std::string title = str(title_of(what, lane()), what.peer < 0 ? "" : str(" with rank ", what.peer));
    const std::string silence = told_of_silence(control(), ranks(), what);
    const Error late(ErrorKind::kTimedOut, str(title, " took longer than its time-out", more, silence), what);
    abort(late);
    throw late;
  }

  [[nodiscard]] ErrorContext what_of(const Operation& operation) const {
    return context(operation_name(operation.kind), operation.peer, operation.sequence);
  }

  // Collectives run on the backend's own threads and cannot be aborted there, so this side stops waiting instead:
  // the buffers stay alive through the tensors that the backend holds.
  void wait_collective(const Operation& operation, const c10::intrusive_ptr<c10d::Work>& work, Deadline deadline) {
    const auto settled = std::make_shared<Settled>();
    const auto future = work->getFuture();
    future->addCallback([settled](c10::ivalue::Future&) {
      std::lock_guard lock(settled->mutex);
      settled->done = true;
      settled->changed.notify_all();
    });
    {
      std::unique_lock lock(settled->mutex);
      while (!settled->done && !aborted() && Clock::now() < deadline) {
        watch_departures(operation);
        const Deadline slice = std::min(deadline, Clock::now() + std::chrono::milliseconds(20));
        settled->changed.wait_until(lock, slice, [&] { return settled->done; });
      }
      if (!settled->done) {
        abandoned_ = true;
      }
    }
    if (abandoned_) {
      throw_if_aborted(what_of(operation));
      fail_late(operation, "; did every rank of the group issue it?");
    }
    if (future->hasError()) {
      std::rethrow_exception(future->exception_ptr());
    }
  }

  // gloo says neither rank nor operation. Control knows who died; the clock knows time-outs.
  [[noreturn]] void explain(const Operation& operation, const std::string& error, Deadline deadline) {
    const ErrorContext what = what_of(operation);
    throw_if_aborted(what);
    const std::string where = str(operation_name(operation.kind), " #", operation.sequence, " on lane ", lane());
    // Backends count whole milliseconds and may be early by one.
    if (Clock::now() + std::chrono::milliseconds(2) >= deadline) {
      fail_late(operation, "");
    }
    const Deadline patience = Clock::now() + kBlameWait;
    while (Clock::now() < patience && !aborted() && !farewell_.first_left()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw_if_aborted(what);
    if (const std::optional<int> gone = farewell_.first_left()) {
      fail_without(*gone, operation);  // its end closed the connection
    }
    throw Error(ErrorKind::kTransport, str(where, ": ", error), what);
  }

  C10dBackend backend_;
  std::shared_ptr<const CpuTransports> transports_;
  std::optional<Agreement> agreement_;  // with HPCOMM_CHECK=1
  std::mutex mutex_;
  std::vector<Message> transfers_;  // that the lane waits for, under mutex_
  Farewell farewell_{*this};
  bool interrupted_ = false;
  bool abandoned_ = false;  // written on the lane, read after shut_down()
};

thread_local C10dCommunicator::Group* C10dCommunicator::Group::current = nullptr;

}  // namespace

std::shared_ptr<Communicator> make_c10d_communicator(CommunicatorConfig config, C10dBackend backend,
                                                     std::shared_ptr<const CpuTransports> transports) {
  return std::make_shared<C10dCommunicator>(std::move(config), std::move(backend), std::move(transports));
}

}  // namespace hpcomm
