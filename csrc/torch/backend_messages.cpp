// send, recv and recv from anybody, with tags; and the barrier that names who is missing.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "torch/backend.h"
#include "torch/backend_issue.h"
#include "torch/gil.h"
#include "torch/tensor.h"

namespace hpcomm {

HpcommBackend::C10dWork HpcommBackend::message(c10d::OpType type, const char* title, Tensors& tensors, int peer,
                                               int tag) {
  return for_torch([&]() -> C10dWork {
    const WithoutGil scope;
    const bool sends = type == c10d::OpType::SEND;
    const char* what = sends ? "send" : "recv";
    HPCOMM_REQUIRE(tensors.size() == 1, what, ": expected one tensor, got ", tensors.size());
    HPCOMM_REQUIRE(tag >= 0, what, ": tag ", tag, " is negative");
    HPCOMM_REQUIRE((peer >= 0 && peer < size_ && peer != rank_) || peer == Mailbox::kAnySource, what, ": rank ", rank_,
                   " of ", size_, " has no peer ", peer);
    HPCOMM_REQUIRE(mailbox_ != nullptr, what, ": a group of ", size_, " on the ", communicator_->transport(),
                   " transport carries no messages");
    communicator_->require_open({communicator_->ranks()[static_cast<std::size_t>(rank_)], -1, -1, what});
    const at::Tensor& tensor = tensors[0];
    const at::Tensor memory =
        is_direct(tensor) || sends ? direct(tensor, what) : at::empty(tensor.sizes(), tensor.options());
    const BufferView view = movable_view(memory, what, kHost);
    MailOptions options;
    options.timeout = std::chrono::milliseconds(timeout_);
    options.keepalive = keep(memory);
    options.must_precede = true;
    const bool profiled = at::hasCallbacks();
    const bool staged = !sends && !memory.is_same(tensor);
    auto work = c10::make_intrusive<MessageWork>(rank_, type, profiled ? title : nullptr, tensors, tensor,
                                                 staged ? memory : at::Tensor());
    const std::uint64_t full_tag = tag_in(TagSpace::kUser, static_cast<std::uint64_t>(tag));
    work->attach(sends ? mailbox_->send(view, peer, full_tag, options) : mailbox_->recv(view, peer, full_tag, options));
    if (coalescing_.load(std::memory_order_relaxed)) {
      const std::lock_guard lock(coalescing_mutex_);
      coalesced_.push_back(work);
    }
    return work;
  });
}

HpcommBackend::C10dWork HpcommBackend::send(Tensors& tensors, int peer, int tag) {
  return message(c10d::OpType::SEND, "hpcomm:send", tensors, peer, tag);
}

HpcommBackend::C10dWork HpcommBackend::recv(Tensors& tensors, int peer, int tag) {
  return message(c10d::OpType::RECV, "hpcomm:recv", tensors, peer, tag);
}

HpcommBackend::C10dWork HpcommBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(c10d::OpType::RECVANYSOURCE, "hpcomm:recvAnySource", tensors, Mailbox::kAnySource, tag);
}

namespace {

// A word of a monitored barrier; kept by the message that carries it. As an answer: kAllHere, kNotAllHere, or the rank
// in the job whose process is gone.
struct Note {
  std::shared_ptr<std::int32_t> word = std::make_shared<std::int32_t>(0);

  [[nodiscard]] BufferView view() const { return {word.get(), sizeof *word, 1, DType::kInt32, {}}; }
};

constexpr std::int32_t kAllHere = -1;
constexpr std::int32_t kNotAllHere = -2;

// One barrier, of one rank: rank 0 hears from everybody, then answers everybody.
class MonitoredBarrier {
 public:
  MonitoredBarrier(Mailbox& mailbox, std::uint64_t tag, ErrorContext what, std::chrono::milliseconds limit)
      : mailbox_(mailbox), tag_(tag), what_(std::move(what)), limit_(limit) {}

  // Of all other ranks: `rank`, in the group.
  void arrive(int rank) const {
    const Note here;
    const Note answer;
    std::string why;
    std::int32_t gone = kNotAllHere;
    try {
      const MailPtr received = mailbox_.recv(answer.view(), 0, tag_, options(answer, patience()));
      wait_to_end(*mailbox_.send(here.view(), 0, tag_, options(here, patience())), kNoTimeout);
      wait_to_end(*received, kNoTimeout);
      if (*answer.word == kAllHere) {
        return;
      }
      gone = *answer.word;
      why = gone >= 0 ? str("rank 0 reports that rank ", gone, " is gone")
                      : "rank 0 reports that others did not reach it";
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kClosed) {
        throw;
      }
      gone = who_is_gone(error);
      why = error.what();
    }
    fail(gone, str("Rank ", rank, " successfully reached monitoredBarrier, but received errors while waiting for ",
                   "send/recv from rank 0. Please check rank 0 logs for faulty rank.\n", why));
  }

  // Of rank 0, in a group of `size`; names the first that is missing, or all.
  void gather(int size, bool name_all) const {
    const Deadline deadline = deadline_after(limit_);
    std::vector<MailPtr> arrivals;
    for (int peer = 1; peer < size; ++peer) {
      const Note here;
      arrivals.push_back(mailbox_.recv(here.view(), peer, tag_, options(here, limit_)));
    }
    std::string missing;
    std::string details;
    std::int32_t gone = kNotAllHere;
    for (int peer = 1; peer < size; ++peer) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      try {
        wait_to_end(*arrivals[static_cast<std::size_t>(peer - 1)], std::max(left, std::chrono::milliseconds(1)));
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kClosed) {
          throw;
        }
        if (missing.empty() || name_all) {
          missing += str(missing.empty() ? "" : ", ", peer);
          details += str("\n", error.what());
          gone = gone >= 0 ? gone : who_is_gone(error);
        }
      }
    }
    const std::vector<MailPtr> answers = answer(size, missing.empty() ? kAllHere : gone);
    if (!missing.empty()) {
      fail(gone, str("[Rank 0]: ", name_all ? "Ranks " : "Rank ", missing, " failed to pass monitoredBarrier in ",
                     limit_.count(), " ms", details));
    }
    for (const MailPtr& sent : answers) {
      wait_to_end(*sent, kNoTimeout);
    }
  }

 private:
  // Rank 0 gives up first, so that the others hear from it.
  [[nodiscard]] std::chrono::milliseconds patience() const { return limit_ + std::chrono::seconds(5); }

  [[nodiscard]] static MailOptions options(const Note& note, std::chrono::milliseconds timeout) {
    MailOptions mail;
    mail.timeout = timeout;
    mail.keepalive = note.word;
    return mail;
  }

  [[nodiscard]] std::vector<MailPtr> answer(int size, std::int32_t word) const {
    std::vector<MailPtr> answers;
    for (int peer = 1; peer < size; ++peer) {
      const Note note;
      *note.word = word;
      try {
        answers.push_back(mailbox_.send(note.view(), peer, tag_, options(note, patience())));
      } catch (const Error&) {
        // It has left or died: what gather() throws says so.
      }
    }
    return answers;
  }

  [[nodiscard]] static std::int32_t who_is_gone(const Error& error) {
    return error.kind() == ErrorKind::kRankFailed && error.context().peer >= 0 ? error.context().peer : kNotAllHere;
  }

  // A rank that is gone is no rank that is late.
  [[noreturn]] void fail(std::int32_t gone, const std::string& text) const {
    ErrorContext context = what_;
    context.peer = std::max(gone, -1);
    throw Error(gone >= 0 ? ErrorKind::kRankFailed : ErrorKind::kTimedOut, text, std::move(context));
  }

  Mailbox& mailbox_;
  const std::uint64_t tag_;
  const ErrorContext what_;
  const std::chrono::milliseconds limit_;
};

}  // namespace

// Not on the lane: it has to work when the lane is stuck.
void HpcommBackend::monitoredBarrier(const c10d::BarrierOptions& barrier_options, bool wait_all_ranks) {
  for_torch([&] {
    const WithoutGil scope;
    const std::int64_t asked = barrier_options.timeout.count();
    const std::chrono::milliseconds limit(asked >= 0 ? asked : timeout_.load());
    const std::uint64_t tag = tag_in(TagSpace::kMonitoredBarrier, monitored_barriers_++);
    const ErrorContext what = communicator_->context("monitored_barrier", -1, tag & 0xffffffffU);
    if (limit.count() == 0) {
      throw Error(ErrorKind::kTimedOut, str("Rank ", rank_, " timed out in monitoredBarrier after 0 ms."), what);
    }
    if (size_ == 1) {
      return;
    }
    HPCOMM_REQUIRE(mailbox_ != nullptr, "monitored_barrier: the ", communicator_->transport(),
                   " transport carries no messages");
    const MonitoredBarrier barrier(*mailbox_, tag, what, limit);
    if (rank_ == 0) {
      barrier.gather(size_, wait_all_ranks);
    } else {
      barrier.arrive(rank_);
    }
  });
}

}  // namespace hpcomm
