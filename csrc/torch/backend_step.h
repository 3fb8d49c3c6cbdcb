// Inside a composed collective: what it agrees on with its peers, and the operations and messages it is made of.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <memory>
#include <string>
#include <vector>

#include "comm/host_communicator.h"
#include "comm/mailbox.h"

namespace hpcomm {

// Tags of torch's send and recv are 32 bits wide; the bits above say whose message it is.
enum class TagSpace : std::uint64_t { kUser = 0, kComposed = 1, kMonitoredBarrier = 2 };
[[nodiscard]] constexpr std::uint64_t tag_in(TagSpace space, std::uint64_t tag) noexcept {
  return (static_cast<std::uint64_t>(space) << 32) | (tag & 0xffffffffU);
}

// --- Tensors as operations take them ---------------------------------------------------------------------------------

// True when an operation can work on the tensor's own memory.
[[nodiscard]] bool is_direct(const at::Tensor& tensor);
// Whether they may not be given to a Communicator as they are: are_apart_or_in_place() is false.
[[nodiscard]] bool overlap_elsewhere(const at::Tensor& whole, const at::Tensor& part, int rank);
// Which of `written` share memory with any of `read`. (Their spans, at least.)
[[nodiscard]] std::vector<bool> overlap_any(const std::vector<at::Tensor>& written,
                                            const std::vector<at::Tensor>& read);
// `target`, or contiguous memory of its shape, from which deliver() copies to it afterwards.
[[nodiscard]] at::Tensor receptacle(const at::Tensor& target);
void deliver(const at::Tensor& received, const at::Tensor& target);
// `tensor`, of the host, itself or a contiguous copy. Checks device and layout.
[[nodiscard]] at::Tensor direct(const at::Tensor& tensor, const char* what);
// The same storage, sizes and strides in a tensor that has no Python object, so the lane lets go of it without the GIL,
// and counts its own changes: torch asserts that a view's counter does not change behind the back of autograd, and the
// lane writes when the call has returned.
[[nodiscard]] at::Tensor lane_alias(const at::Tensor& tensor);
[[nodiscard]] std::vector<at::Tensor> lane_aliases(const std::vector<at::Tensor>& tensors);
inline constexpr Device kHost{};
// Of a tensor on `device`. For data that is only moved: dtypes that NCCL does not know travel as bytes there.
[[nodiscard]] BufferView movable_view(const at::Tensor& tensor, const char* what, Device device);
// For a reduction: complex numbers that the transport does not know are added as pairs of real ones.
[[nodiscard]] BufferView reducible_view(const at::Tensor& tensor, ReduceOp op, const char* what, Device device);

// c10d's reduction: an operation of ours, and for PREMUL_SUM the factor that comes before.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  at::Tensor factor;  // undefined for one

  [[nodiscard]] bool is_plain() const { return !factor.defined(); }
  // A contiguous tensor, ready to be reduced: `tensor` itself, or a copy where one is needed or `fresh` asks for it.
  [[nodiscard]] at::Tensor prepared(const at::Tensor& tensor, bool fresh, const char* what) const;
};

// What c10d asks for. `what` is for messages.
[[nodiscard]] Reduction reduction(const c10d::ReduceOp& op, const char* what);

// --- One step after the other ----------------------------------------------------------------------------------------

class Step {
 public:
  Step(HostCommunicator& communicator, Mailbox* mailbox, const ErrorContext& what, Deadline deadline);

  [[nodiscard]] int rank() const noexcept { return communicator_.rank(); }
  [[nodiscard]] int size() const noexcept { return communicator_.size(); }

  // Every rank shows `mine`, of equal length on all of them; returns all, one after the other in rank order. Before
  // messages: it tells everybody their tag.
  [[nodiscard]] std::vector<std::int64_t> show(std::vector<std::int64_t> mine);
  // Throws kSchemaMismatch on every rank unless all describe the same call.
  void agree(const at::Tensor& tensor, int root, std::int64_t count);
  // In place of agree(), for what only this rank can see to be wrong: throws kInvalidArgument here, and kSchemaMismatch
  // on the others.
  [[noreturn]] void refuse(const at::Tensor& tensor, int root, const std::string& why);
  // The same where there are many tensors: as many on all ranks, of equal dtypes and sizes.
  void agree_on_all(const std::vector<at::Tensor>& tensors);
  // `one` and `other` are what two of this group's ranks called.
  [[noreturn]] void mismatch(std::size_t rank, const std::string& one, std::size_t peer,
                             const std::string& other) const;

  void all_reduce(const at::Tensor& tensor, ReduceOp op) const;
  // Those of two tensors may share memory in any way.
  void all_gather(const at::Tensor& output, const at::Tensor& input) const;
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const;
  void all_to_all(const at::Tensor& output, const at::Tensor& input) const;
  void broadcast(const at::Tensor& tensor, int root) const;

  // Messages of this operation; they move together in exchange(). Empty ones are skipped, on both ends.
  void send(const at::Tensor& contiguous, int peer);
  void recv(const at::Tensor& contiguous, int peer);
  void exchange();

 private:
  struct Description;
  // False where ranks have as many tensors, and others; throws kSchemaMismatch on all ranks for any other difference.
  [[nodiscard]] bool compare(Description mine);
  // Until the deadline; 1 ms when it is over, for 0 means the communicator's default.
  [[nodiscard]] std::chrono::milliseconds left() const;
  [[nodiscard]] OpOptions options() const;
  [[nodiscard]] MailOptions mail_options(const at::Tensor& tensor) const;

  HostCommunicator& communicator_;
  Mailbox* mailbox_;
  const ErrorContext& what_;
  const Deadline deadline_;
  void (*const poll_)();
  std::uint64_t tag_ = 0;
  std::vector<MailPtr> messages_;
};

}  // namespace hpcomm
