// The Communicator over NCCL: checks, order, launch, works. Its NCCL half is the Session (nccl_session.h).
#include "comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "comm/agreement.h"
#include "comm/issued.h"
#include "comm/nccl/launch_order.h"
#include "comm/nccl/nccl_calls.h"
#include "comm/nccl/nccl_init.h"
#include "comm/nccl/nccl_memory.h"
#include "comm/nccl/teardown.h"
#include "comm/nccl/watchdog.h"
#include "stream/cuda_call.h"

namespace hpcomm {

namespace {

using namespace nccl;

constexpr std::size_t kMostInGroup = 2048;  // NCCL's own limit
// Longer than a finalisation waits for peers, and an abort after it.
constexpr std::chrono::seconds kTeardown{8};
constexpr std::chrono::seconds kPeersFollow{5};  // a blocking one waits for them itself
// The host runs ahead of its device: what a lane that is dropped has issued is under way, and ends unless a peer does
// not come.
constexpr std::chrono::seconds kUnderWay{3};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(CommunicatorConfig config, const NcclOptions& options, SessionPtr session, SessionPtr parent,
                   bool launch_order)
      : Communicator(std::move(config)),
        options_(options),
        session_(std::move(session)),
        parent_(std::move(parent)),
        order_(LaunchOrder::of(session_->device)),
        nccl_keeps_order_(keeps_launch_order(session_->nccl, launch_order)) {
    if (checks()) {
      agreement_.emplace(*this);
    }
    watch(session_);
  }

  // The rest of construction, which may fail: by then the destructor is there to clean up.
  void complete() { scratch_ = nccl::allocate(session_, 1); }

  ~NcclCommunicator() override {
    if (forked()) {
      return;  // threads, locks and the device are the parent's
    }
    try {
      if (!idle_until(Clock::now() + kUnderWay)) {
        const Error why(ErrorKind::kClosed, "the communicator was destroyed while operations were pending",
                        context("close", -1, 0));
        std::fprintf(stderr, "hpcomm: rank %d: %s on lane %s\n", why.context().rank, why.what(), lane().c_str());
        abort(why);
      }
      end();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "hpcomm: an NCCL communicator of lane %s ends badly: %s\n", lane().c_str(), error.what());
    }
    session_->stop_listening();
    if (parent_ != nullptr) {
      parent_->stop_listening();
    }
  }

  [[nodiscard]] const char* transport() const noexcept override { return "nccl"; }
  [[nodiscard]] Device device() const noexcept override { return {DeviceType::kCuda, session_->device}; }
  [[nodiscard]] bool averages_well() const noexcept override { return true; }
  [[nodiscard]] bool premultiplies() const noexcept override { return true; }
  [[nodiscard]] bool take_behind() const noexcept override { return true; }
  // NVSwitches add (NVLS), and multiply by nothing: an average of floats is summed by the GPUs.
  [[nodiscard]] bool sums_faster() const noexcept override { return true; }
  [[nodiscard]] Buffer allocate(std::size_t bytes) override { return allocate(bytes, false); }
  [[nodiscard]] Buffer allocate_alike(std::size_t bytes) override { return allocate(bytes, options_.registers); }

  void group(const std::function<void()>& issue) override {
    if (Group::current != nullptr && Group::current->owner == this) {
      issue();  // a group within a group is part of it
      return;
    }
    Group collected{this, Group::current, {}};
    Group::current = &collected;
    try {
      issue();
    } catch (const std::exception& error) {
      Group::current = collected.outer;
      // Nothing was launched. What the caller may hold ends with the same words.
      for (const Issue& entry : collected.issues) {
        entry.work->fail(Error(ErrorKind::kClosed, str("its group was given up: ", error.what())));
      }
      throw;
    }
    Group::current = collected.outer;
    launch(collected.issues);
  }

  [[nodiscard]] WorkPtr follow(const WorkPtr& operation, ErrorContext what, Keepalive held) override {
    const auto* const own = dynamic_cast<const NcclWork*>(operation.get());
    auto work = std::make_shared<NcclWork>(std::move(what), lane(), device(), own != nullptr ? own->limit() : timeout(),
                                           operation);
    work->needs_only({});  // it ends behind operations that need somebody
    const LaunchOrder::Turn turn(order_);
    try {
      const cuda::DeviceGuard guard(session_->device);
      record({work}, std::move(held));
    } catch (const Error& error) {
      work->fail(error);
    }
    return work;
  }

  [[nodiscard]] bool idle_until(Deadline deadline) const override {
    return forked() || session_->idle_until(deadline) || session_->is_aborted();
  }

  void begin_close() override {
    if (forked()) {
      return;
    }
    session_->refuse_more();
    if (session_->idle_until(deadline_after(timeout()))) {
      begin_end();
    }  // else it was aborted: the works say why; or the watchdog is about to
  }

  void close() override {
    begin_close();
    if (ends_ != Deadline{} && !forked()) {
      end();
    }
  }

  void abort(const Error& why) noexcept override {
    if (forked()) {
      return;
    }
    session_->abort(why, true);
    if (parent_ != nullptr) {
      parent_->abort(why, false);
    }
    wake_watchdog();
  }

  [[nodiscard]] std::optional<Error> aborted() const override { return session_->aborted(); }

 protected:
  void require_open(const ErrorContext& what) const override {
    if (forked()) {
      throw Error(ErrorKind::kClosed,
                  str(what.operation, " on lane ", lane(), " in a forked child: CUDA and NCCL belong to its parent. ",
                      "Communicate from the process that called init(), or start workers by spawn"),
                  what);
    }
    session_->require_open(what);
  }

  WorkPtr submit(Operation operation) override {
    ErrorContext what = context(operation_name(operation.kind), operation.peer, operation.sequence);
    require_open(what);
    Issue issue;
    issue.calls = checked_calls(operation, what);
    issue.poll = operation.options.poll != nullptr ? operation.options.poll : config().poll;
    if (agreement_) {
      issue.issued = issued_by(operation);
    }
    issue.keepalive = std::move(operation.options.keepalive);
    issue.behind = operation.options.behind;
    const auto limit = operation.options.timeout.count() > 0 ? operation.options.timeout : timeout();
    issue.work = std::make_shared<NcclWork>(std::move(what), lane(), device(), limit);
    issue.is_message = is_message(operation.kind);
    if (issue.is_message) {
      std::vector<int> ends;
      for (const Call& call : issue.calls) {  // none of what is empty
        ends.push_back(call.peer);
      }
      issue.work->needs_only(std::move(ends));
    }
    session_->require_present(*issue.work);
    WorkPtr work = issue.work;
    if (issue.calls.empty() && issue.issued.empty()) {
      issue.work->finished();
      return work;
    }
    if (Group::current != nullptr && Group::current->owner == this) {
      HPCOMM_ASSERT(issue.behind == nullptr, "a group is launched later");
      Group::current->add(std::move(issue));
      return work;
    }
    std::vector<Issue> alone;
    alone.push_back(std::move(issue));
    launch(alone);
    return work;
  }

  [[nodiscard]] std::shared_ptr<Communicator> make_child(CommunicatorConfig child) override {
    return make(std::move(child), options_, false);
  }

  [[nodiscard]] std::shared_ptr<Communicator> make_part(CommunicatorConfig part) override {
    // NCCL wants colors of zero and above, and keys in our order: the first member's rank names the part.
    const auto first = std::find(ranks().begin(), ranks().end(), part.ranks.front());
    const auto color = static_cast<int>(first - ranks().begin());
    const SessionPtr& parent = parent_ != nullptr ? parent_ : session_;
    if (parent->blocking) {
      return make(std::move(part), options_, false);
    }
    const bool launch_order = asks_for_launch_order();
    SessionPtr session =
        nccl::split(*parent, part, color, options_, launch_order, parent_ != nullptr, deadline_after(part.timeout));
    return finish(std::move(part), options_, std::move(session), nullptr, launch_order);
  }

 public:
  // One that `splits` keeps what its parts are split from.
  [[nodiscard]] static std::shared_ptr<Communicator> make(CommunicatorConfig config, const NcclOptions& options,
                                                          bool splits) {
    const bool launch_order = asks_for_launch_order();
    auto [session, parent] = connect(config, options, launch_order, splits);
    return finish(std::move(config), options, std::move(session), std::move(parent), launch_order);
  }

 private:
  [[nodiscard]] static std::shared_ptr<Communicator> finish(CommunicatorConfig config, const NcclOptions& options,
                                                            SessionPtr session, SessionPtr parent, bool launch_order) {
    auto made = std::make_shared<NcclCommunicator>(std::move(config), options, std::move(session), std::move(parent),
                                                   launch_order);
    made->complete();
    return made;
  }

  struct Issue {
    std::vector<Call> calls;
    NcclWorkPtr work;
    bool is_message = false;
    Keepalive keepalive;
    const std::function<void()>* behind = nullptr;
    void (*poll)() = nullptr;
    std::vector<Issued> issued;  // of a communicator that checks. Of messages, one for each of `calls`
  };

  // What a thread collects between the begin and the end of a group.
  struct Group {
    const NcclCommunicator* owner;
    Group* outer;
    std::vector<Issue> issues;

    void add(Issue issue) {
      std::size_t calls = issue.calls.size();
      for (const Issue& entry : issues) {
        calls += entry.calls.size();
      }
      HPCOMM_REQUIRE(calls <= kMostInGroup, "a group of more than ", kMostInGroup, " operations on lane ",
                     owner->lane(), ": make several groups, in the same way on both ends");
      issues.push_back(std::move(issue));
    }

    static thread_local Group* current;
  };

  [[nodiscard]] Buffer allocate(std::size_t bytes, bool registered) {
    require_open(context("allocate", -1, 0));
    return behind(compute(), nccl::allocate(session_, bytes, registered));
  }

  [[nodiscard]] bool forked() const noexcept { return fork_generation() != session_->generation; }

  void require_buffer(const BufferView& buffer, const ErrorContext& what) const {
    HPCOMM_REQUIRE(buffer.count == 0 || (buffer.data != nullptr && buffer.device == device()), title_of(what, lane()),
                   ": a buffer is not on CUDA device ", session_->device);
  }

  [[nodiscard]] std::vector<Call> checked_calls(const Operation& operation, const ErrorContext& what) const {
    using Kind = Operation::Kind;
    if (operation.kind == Kind::kBarrier) {
      void* one = scratch_.view.data;
      return {{Call::Kind::kAllReduce, one, one, 1, DataType::kUInt8, RedOp::kMax, -1}};
    }
    const BufferView& input = operation.input;
    const BufferView& output = operation.output;
    require_buffer(input, what);
    require_buffer(output, what);
    if (operation.kind == Kind::kAllToAll) {
      HPCOMM_REQUIRE(are_apart(input, output), title_of(what, lane()),
                     ": input and output overlap, and NCCL needs two buffers");
    }
    return calls_of(operation, static_cast<std::size_t>(size()), what);
  }

  // Waits, before anything of NCCL keeps the host or the device, until the others have issued the same. What does not
  // fit is taken out of `issues`: its other ends do not launch it either. Returns the error of the first of them.
  [[nodiscard]] std::optional<Error> agree(std::vector<Issue>& issues) {
    std::vector<Issued> issued;
    for (const Issue& issue : issues) {
      issued.insert(issued.end(), issue.issued.begin(), issue.issued.end());
    }
    Agreement::Results differences;
    try {
      if (!issued.empty()) {
        differences = agreement_->meet(issued, issues.front().work->deadline(), issues.front().poll);
      }
    } catch (...) {
      // Nothing was launched. A communicator that another thread has closed meanwhile has no reason of its own.
      const Error why = aborted().value_or(Error(ErrorKind::kClosed, "the communicator was closed"));
      for (const Issue& issue : issues) {
        issue.work->fail(why);
      }
      throw;
    }
    std::optional<Error> first;
    auto difference = differences.cbegin();
    for (Issue& issue : issues) {
      std::optional<Error> own;
      std::vector<Call> fitting;
      for (std::size_t i = 0; i < issue.issued.size(); ++i, ++difference) {
        if (!*difference) {
          // A collective may be several calls, as all_to_all is; or none, where all ranks found it empty.
          const bool whole = issue.issued[i].peer < 0;
          const auto at = issue.calls.begin() + static_cast<std::ptrdiff_t>(i);
          fitting.insert(fitting.end(), whole ? issue.calls.begin() : at, whole ? issue.calls.end() : at + 1);
        } else if (!own) {
          own = *difference;
        }
      }
      issue.calls = std::move(fitting);
      if (own) {
        issue.work->fail(*own);
        first = first ? first : own;
        issue.work = issue.work->again();  // the half of a sendrecv that fits is an operation of its own
      }
    }
    return first;
  }

  void launch(std::vector<Issue>& issues) {
    if (issues.empty()) {
      return;
    }
    std::optional<Session::Issuing> pending;
    try {
      pending.emplace(*session_, issues.front().work->what());
    } catch (const Error& error) {
      for (const Issue& issue : issues) {
        issue.work->fail(error);
      }
      throw;
    }
    const std::optional<Error> differs = agreement_ ? agree(issues) : std::nullopt;
    launch_fitting(issues);
    if (differs) {
      for (const Issue& issue : issues) {
        try {
          issue.work->wait();     // before its caller hears of the error, and lets go of its buffers
        } catch (const Error&) {  // in a capture; or of less weight
        }
      }
      throw Error(*differs);
    }
  }

  // One thread at a time issues on a device: what it launches here starts in this order.
  void launch_fitting(std::vector<Issue>& issues) {
    std::vector<Call> calls;
    std::vector<NcclWorkPtr> works;
    auto keepalives = std::make_shared<std::vector<Keepalive>>();
    for (Issue& issue : issues) {
      calls.insert(calls.end(), issue.calls.begin(), issue.calls.end());
      if (issue.calls.empty()) {
        issue.work->finished();
        continue;
      }
      works.push_back(issue.work);
      if (issue.keepalive != nullptr) {
        keepalives->push_back(std::move(issue.keepalive));
      }
    }
    if (calls.empty()) {
      return;
    }
    const bool are_messages = std::all_of(issues.begin(), issues.end(), [](const Issue& it) { return it.is_message; });
    LaunchOrder::Turn turn(order_);
    try {
      const cuda::DeviceGuard guard(session_->device);
      const bool by_events = !nccl_keeps_order_ && !cuda::is_capturing(handle());
      if (by_events) {
        order_.before(stream(), are_messages);
      }
      {
        const Session::Launching inside(*session_, works);
        turn.enter_nccl();
        make_calls(*session_, calls, stream().native_handle(), works.front()->deadline(), works.front()->what(),
                   issues.front().poll);
      }
      if (turn.take_back() && by_events && !are_messages) {
        order_.before(stream(), false);  // what others have issued meanwhile is before what comes next
      }
      for (const Issue& issue : issues) {
        if (issue.behind != nullptr && !issue.calls.empty()) {
          call_behind(*issue.behind, issue.work->what());
        }
      }
      const Event launched = record(works, keepalives->empty() ? nullptr : keepalives);
      if (by_events) {
        order_.after(stream(), are_messages, launched);
      }
    } catch (const Error& error) {
      session_->launch_failed(works, std::move(keepalives), error);
      throw;
    } catch (...) {  // a signal, by way of poll()
      session_->launch_failed(works, std::move(keepalives), Error(ErrorKind::kClosed, "the launch was interrupted"));
      throw;
    }
  }

  // An event behind what was issued up to here, which ends `works`.
  Event record(const std::vector<NcclWorkPtr>& works, Keepalive held) {
    Event event = stream().record();
    const bool captured = event.captured();
    for (const NcclWorkPtr& work : works) {
      captured ? work->captured(event) : work->launched(event);
    }
    if (captured) {
      session_->is_captured = true;
    } else {
      session_->watch(works);
    }
    if (held != nullptr) {
      stream().hold_until(std::move(held), event);
    }
    return event;
  }

  [[nodiscard]] cudaStream_t handle() const { return static_cast<cudaStream_t>(stream().native_handle()); }

  void begin_end() {
    ends_ = ends_ == Deadline{} ? Clock::now() : ends_;
    for (const SessionPtr& session : {session_, parent_}) {
      if (session != nullptr && session->begin_finalize()) {
        start_finalize(session);
      }
    }
  }

  // Waits, with a bound, until the communicator is gone. A second time it would wait in vain.
  void end() {
    if (std::exchange(has_ended_, true)) {
      return;
    }
    begin_end();
    if (session_->wait_gone(ends_ + (session_->blocking ? kPeersFollow : kTeardown))) {
      scratch_ = {};
    } else if (session_->blocking && !session_->is_aborted()) {
      session_->keep(std::move(scratch_.owner));  // until the peers have followed
    } else {
      keep_for_ever(std::move(scratch_.owner));  // a barrier may still run on it
    }
    if (parent_ != nullptr) {
      (void)parent_->wait_gone(Clock::now() + std::chrono::seconds(1));
    }
  }

  const NcclOptions options_;
  const SessionPtr session_;
  // Of a blocking one that may be split: the non-blocking one that it is itself a part of. Splits of it can be aborted.
  const SessionPtr parent_;
  LaunchOrder& order_;
  const bool nccl_keeps_order_;
  Buffer scratch_;
  Deadline ends_{};  // since then
  bool has_ended_ = false;
  std::optional<Agreement> agreement_;  // with HPCOMM_CHECK=1
};

thread_local NcclCommunicator::Group* NcclCommunicator::Group::current = nullptr;

}  // namespace

std::shared_ptr<Communicator> make_nccl_communicator(CommunicatorConfig config, const NcclOptions& options,
                                                     bool will_be_split) {
  HPCOMM_REQUIRE(config.rank >= 0 && config.rank < static_cast<int>(config.ranks.size()), "communicator: rank ",
                 config.rank, " of ", config.ranks.size());
  HPCOMM_REQUIRE(config.stream != nullptr && config.control != nullptr, "communicator: no stream or no Control");
  HPCOMM_REQUIRE(config.stream->device().type == DeviceType::kCuda, "NCCL needs a CUDA stream, for lane ", config.lane);
  return NcclCommunicator::make(std::move(config), options, will_be_split);
}

}  // namespace hpcomm
