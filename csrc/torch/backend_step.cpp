// The steps of composed collectives.
#include "torch/backend_step.h"

#include <algorithm>
#include <chrono>

#include "torch/backend_work.h"
#include "torch/tensor.h"

namespace hpcomm {

namespace {

void require_served(const at::Tensor& tensor, const char* what) {
  HPCOMM_REQUIRE(tensor.defined(), what, ": expected a tensor, got None");
  HPCOMM_REQUIRE(tensor.device().is_cpu(), what, ": got a tensor on ", tensor.device().str(),
                 ", but the CUDA half of hpcomm is not built: it serves CPU tensors. For both kinds in one group use ",
                 "backend=\"cpu:hpcomm,cuda:nccl\"");
  HPCOMM_REQUIRE(tensor.layout() == at::kStrided, what, ": sparse tensors are not supported");
}

// What a rank says of its call, in Step::agree().
struct Description {
  std::int64_t type;
  std::int64_t root;
  std::int64_t count;
  std::int64_t operation;

  [[nodiscard]] std::string text(const std::string& what) const {
    const auto dtype = static_cast<at::ScalarType>(type);
    std::string text = str(what, "(", count, " x ", c10::toString(dtype));
    if (root >= 0) {
      text += str(", root ", root);
    }
    return text + ")";
  }
};

}  // namespace

bool is_direct(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor direct(const at::Tensor& tensor, const char* what) {
  require_served(tensor, what);
  return is_direct(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

at::Tensor lane_alias(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.layout() == at::kStrided ? tensor.detach() : tensor;
}

std::vector<at::Tensor> lane_aliases(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  all.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    all.push_back(lane_alias(tensor));
  }
  return all;
}

BufferView movable_view(const at::Tensor& tensor, const char* what) {
  require_served(tensor, what);
  switch (tensor.scalar_type()) {
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
    case at::kComplexHalf:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e8m0fnu: {
      const std::size_t bytes = tensor.nbytes();
      return {tensor.data_ptr(), bytes, bytes, DType::kUInt8, {}};
    }
    default:  // torch's enum, not ours: it grows
      return view_of(tensor, what);
  }
}

BufferView reducible_view(const at::Tensor& tensor, ReduceOp op, const char* what) {
  require_served(tensor, what);
  BufferView view = view_of(tensor, what);
  if (op == ReduceOp::kSum || op == ReduceOp::kAverage) {
    if (view.dtype == DType::kComplex64) {
      return {view.data, view.bytes, 2 * view.count, DType::kFloat32, view.device};
    }
    if (view.dtype == DType::kComplex128) {
      return {view.data, view.bytes, 2 * view.count, DType::kFloat64, view.device};
    }
  }
  return view;
}

Reduction reduction(const c10d::ReduceOp& op, const char* what) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return {ReduceOp::kSum, {}};
    case c10d::ReduceOp::AVG:
      return {ReduceOp::kAverage, {}};
    case c10d::ReduceOp::PRODUCT:
      return {ReduceOp::kProduct, {}};
    case c10d::ReduceOp::MIN:
      return {ReduceOp::kMin, {}};
    case c10d::ReduceOp::MAX:
      return {ReduceOp::kMax, {}};
    case c10d::ReduceOp::BAND:
      return {ReduceOp::kBitAnd, {}};
    case c10d::ReduceOp::BOR:
      return {ReduceOp::kBitOr, {}};
    case c10d::ReduceOp::BXOR:
      return {ReduceOp::kBitXor, {}};
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      HPCOMM_REQUIRE(factor != nullptr, what, ": PREMUL_SUM without a factor");
      return {ReduceOp::kSum, factor->tensor_factor.defined() ? factor->tensor_factor
                                                              : at::scalar_tensor(factor->double_factor, at::kDouble)};
    }
    case c10d::ReduceOp::UNUSED:
      break;
  }
  HPCOMM_REQUIRE(false, what, ": unknown reduction ", static_cast<int>(op.op_));
  return {};
}

at::Tensor Reduction::prepared(const at::Tensor& tensor, bool fresh, const char* what) const {
  const at::NoGradGuard no_grad;
  at::Tensor ready = direct(tensor, what);
  if (ready.is_same(tensor) && (fresh || !is_plain())) {
    ready = ready.clone(at::MemoryFormat::Contiguous);
  }
  return is_plain() ? ready : ready.mul_(factor);
}

Step::Step(HostCommunicator& communicator, Mailbox* mailbox, const ErrorContext& what, Deadline deadline)
    : communicator_(communicator),
      mailbox_(mailbox),
      what_(what),
      deadline_(deadline),
      // Signals are the business of the thread that waits for us, when this is the lane.
      poll_(communicator.stream().is_current() ? nullptr : &poll_signals) {}

OpOptions Step::options() const {
  OpOptions options;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
  options.timeout = std::max(left, std::chrono::milliseconds(1));
  options.poll = poll_;
  return options;
}

std::vector<std::int64_t> Step::show(std::vector<std::int64_t> mine) {
  // Ranks count alike, unless one of them has refused a call that the others went through with: rank 0's number holds.
  mine.push_back(what_.sequence);
  std::vector<std::int64_t> all(mine.size() * static_cast<std::size_t>(size()));
  const auto view = [](std::vector<std::int64_t>& numbers) {
    return BufferView{numbers.data(), numbers.size() * sizeof(std::int64_t), numbers.size(), DType::kInt64, {}};
  };
  OpOptions opening = options();
  opening.opens_composed = true;
  communicator_.all_gather(view(all), view(mine), opening)->wait();
  tag_ = tag_in(TagSpace::kComposed, static_cast<std::uint64_t>(all[mine.size() - 1]));
  for (int peer = size() - 1; peer >= 0; --peer) {
    all.erase(all.begin() + static_cast<std::ptrdiff_t>(mine.size()) * (peer + 1) - 1);
  }
  return all;
}

void Step::mismatch(std::size_t rank, const std::string& one, std::size_t peer, const std::string& other) const {
  ErrorContext context = what_;
  const auto& job_ranks = communicator_.ranks();
  context.peer = job_ranks[peer];
  throw Error(ErrorKind::kSchemaMismatch,
              str(what_.operation, " #", what_.sequence, " on lane ", communicator_.lane(), ": ranks disagree: rank ",
                  job_ranks[rank], " called ", one, ", rank ", job_ranks[peer], " called ", other,
                  "; no data has moved and the group is usable"),
              std::move(context));
}

void Step::agree(const at::Tensor& tensor, int root, std::int64_t count) {
  Description mine{static_cast<std::int64_t>(tensor.scalar_type()), root, count, 0};
  for (const char letter : what_.operation) {
    mine.operation = mine.operation * 31 + letter;  // names of ours: no two are alike
  }
  const auto all = show({mine.type, mine.root, mine.count, mine.operation});
  for (int peer = 1; peer < size(); ++peer) {
    if (!std::equal(all.begin(), all.begin() + 4, all.begin() + std::ptrdiff_t{4} * peer)) {
      const auto at = [&](int member) {
        const auto* words = all.data() + std::ptrdiff_t{4} * member;
        const Description theirs{words[0], words[1], words[2], words[3]};
        return theirs.text(theirs.operation == mine.operation ? what_.operation : "another collective");
      };
      mismatch(0, at(0), static_cast<std::size_t>(peer), at(peer));
    }
  }
}

void Step::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  communicator_.all_reduce(reducible_view(tensor, op, what_.operation.c_str()), op, options())->wait();
}

void Step::all_gather(const at::Tensor& output, const at::Tensor& input) const {
  const char* what = what_.operation.c_str();
  communicator_.all_gather(movable_view(output, what), movable_view(input, what), options())->wait();
}

void Step::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  const char* what = what_.operation.c_str();
  communicator_.reduce_scatter(reducible_view(output, op, what), reducible_view(input, op, what), op, options())
      ->wait();
}

void Step::all_to_all(const at::Tensor& output, const at::Tensor& input) const {
  const char* what = what_.operation.c_str();
  communicator_.all_to_all(movable_view(output, what), movable_view(input, what), options())->wait();
}

void Step::broadcast(const at::Tensor& tensor, int root) const {
  communicator_.broadcast(movable_view(tensor, what_.operation.c_str()), root, options())->wait();
}

OpOptions Step::mail_options(const at::Tensor& tensor) const {
  HPCOMM_ASSERT(mailbox_ != nullptr, "the ", communicator_.transport(), " transport carries no messages");
  OpOptions mail = options();
  mail.poll = nullptr;
  mail.keepalive = keep(tensor);
  return mail;
}

void Step::send(const at::Tensor& contiguous, int peer) {
  if (contiguous.numel() > 0) {
    const BufferView view = movable_view(contiguous, what_.operation.c_str());
    const OpOptions mail = mail_options(contiguous);
    messages_.push_back(mailbox_->send(view, peer, tag_, mail));
  }
}

void Step::recv(const at::Tensor& contiguous, int peer) {
  if (contiguous.numel() > 0) {
    const BufferView view = movable_view(contiguous, what_.operation.c_str());
    const OpOptions mail = mail_options(contiguous);
    messages_.push_back(mailbox_->recv(view, peer, tag_, mail));
  }
}

void Step::exchange() {
  constexpr auto kPoll = std::chrono::milliseconds(50);
  for (const MailPtr& message : messages_) {
    while (!message->wait_until(Clock::now() + kPoll)) {  // each has its own deadline
      if (poll_ != nullptr) {
        poll_();
      }
    }
  }
  messages_.clear();
}

}  // namespace hpcomm
