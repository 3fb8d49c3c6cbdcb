// send, recv and recv from anybody, with tags; and the barrier that names who is missing.
#include <algorithm>

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
    const at::Tensor& tensor = tensors[0];
    const at::Tensor memory =
        is_direct(tensor) || sends ? direct(tensor, what) : at::empty(tensor.sizes(), tensor.options());
    const BufferView view = movable_view(memory, what, kHost);
    MailOptions options;
    options.timeout = std::chrono::milliseconds(timeout_);
    options.keepalive = keep(memory);
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

}  // namespace

// Not on the lane: it has to work when the lane is stuck. Rank 0 hears from everybody, then answers everybody.
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
    const auto options = [&](const Note& note, std::chrono::milliseconds timeout) {
      MailOptions mail;
      mail.timeout = timeout;
      mail.keepalive = note.word;
      return mail;
    };
    // A rank that is gone is no rank that is late.
    const auto fail = [&](std::int32_t gone, const std::string& text) {
      ErrorContext context = what;
      context.peer = std::max(gone, -1);
      throw Error(gone >= 0 ? ErrorKind::kRankFailed : ErrorKind::kTimedOut, text, std::move(context));
    };
    const auto who_is_gone = [](const Error& error) {
      return error.kind() == ErrorKind::kRankFailed && error.context().peer >= 0 ? error.context().peer : kNotAllHere;
    };
    // Rank 0 gives up first, so that the others hear from it.
    const auto patience = limit + std::chrono::seconds(5);
    if (rank_ != 0) {
      const Note here;
      const Note answer;
      std::string why;
      std::int32_t gone = kNotAllHere;
      try {
        const MailPtr received = mailbox_->recv(answer.view(), 0, tag, options(answer, patience));
        wait_to_end(*mailbox_->send(here.view(), 0, tag, options(here, patience)), kNoTimeout);
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
      fail(gone, str("Rank ", rank_, " successfully reached monitoredBarrier, but received errors while waiting for ",
                     "send/recv from rank 0. Please check rank 0 logs for faulty rank.\n", why));
    }
    const Deadline deadline = deadline_after(limit);
    std::vector<MailPtr> arrivals;
    for (int peer = 1; peer < size_; ++peer) {
      const Note here;
      arrivals.push_back(mailbox_->recv(here.view(), peer, tag, options(here, limit)));
    }
    std::string missing;
    std::string details;
    std::int32_t gone = kNotAllHere;
    for (int peer = 1; peer < size_; ++peer) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      try {
        wait_to_end(*arrivals[static_cast<std::size_t>(peer - 1)], std::max(left, std::chrono::milliseconds(1)));
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kClosed) {
          throw;
        }
        if (missing.empty() || wait_all_ranks) {
          missing += str(missing.empty() ? "" : ", ", peer);
          details += str("\n", error.what());
          gone = gone >= 0 ? gone : who_is_gone(error);
        }
      }
    }
    std::vector<MailPtr> answers;
    for (int peer = 1; peer < size_; ++peer) {
      const Note answer;
      *answer.word = missing.empty() ? kAllHere : gone;
      try {
        answers.push_back(mailbox_->send(answer.view(), peer, tag, options(answer, patience)));
      } catch (const Error&) {
        // It has left or died: the error below says so.
      }
    }
    if (!missing.empty()) {
      fail(gone, str("[Rank 0]: ", wait_all_ranks ? "Ranks " : "Rank ", missing, " failed to pass monitoredBarrier in ",
                     limit.count(), " ms", details));
    }
    for (const MailPtr& answer : answers) {
      wait_to_end(*answer, kNoTimeout);
    }
  });
}

}  // namespace hpcomm
