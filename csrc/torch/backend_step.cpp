// The steps of composed collectives.
#include "torch/backend_step.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>

#include "comm/issued.h"
#include "torch/backend_work.h"
#include "torch/device.h"
#include "torch/gil.h"
#include "torch/tensor.h"

namespace hpcomm {

namespace {

void require_served(const at::Tensor& tensor, const char* what, Device device) {
  HPCOMM_REQUIRE(tensor.defined(), what, ": expected a tensor, got None");
  HPCOMM_REQUIRE(tensor.is_cpu() || built_with_cuda(), what, ": got a tensor on ", tensor.device().str(),
                 ", but the CUDA half of hpcomm is not built: it serves CPU tensors. For both kinds in one group use ",
                 "backend=\"cpu:hpcomm,cuda:nccl\"");
  HPCOMM_REQUIRE(tensor.device() == torch_device(device), what, ": got a tensor on ", tensor.device().str(),
                 " among those on ", torch_device(device).str());
  HPCOMM_REQUIRE(tensor.layout() == at::kStrided, what, ": sparse tensors are not supported");
}

}  // namespace

bool is_direct(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_contiguous() && holds_its_values(tensor);
}

bool overlap_elsewhere(const at::Tensor& whole, const at::Tensor& part, int rank) {
  if (!is_direct(whole) || !is_direct(part) || !whole.is_alias_of(part)) {
    return false;
  }
  const auto bytes_of = [](const at::Tensor& tensor) {
    return BufferView{const_cast<void*>(tensor.const_data_ptr()), tensor.nbytes(), tensor.nbytes(), DType::kUInt8, {}};
  };
  return !are_apart_or_in_place(bytes_of(whole), bytes_of(part), rank);
}

std::vector<bool> overlap_any(const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read) {
  using Span = std::pair<const char*, const char*>;
  const auto span_of = [](const at::Tensor& tensor) {
    const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
    return Span{begin, begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize())};
  };
  std::vector<Span> spans;
  for (const auto& tensor : read) {
    if (tensor.numel() > 0) {
      spans.push_back(span_of(tensor));
    }
  }
  std::sort(spans.begin(), spans.end());
  for (std::size_t i = 1; i < spans.size(); ++i) {
    spans[i].second = std::max(spans[i].second, spans[i - 1].second);  // of all that begin before
  }
  std::vector<bool> overlap;
  for (const auto& tensor : written) {
    const Span own = span_of(tensor);
    const auto behind = std::lower_bound(spans.begin(), spans.end(), own.second,
                                         [](const Span& span, const char* end) { return span.first < end; });
    overlap.push_back(tensor.numel() > 0 && behind != spans.begin() && std::prev(behind)->second > own.first);
  }
  return overlap;
}

at::Tensor receptacle(const at::Tensor& target) {
  return is_direct(target) ? target : at::empty(target.sizes(), target.options());
}

void deliver(const at::Tensor& received, const at::Tensor& target) {
  if (!received.is_same(target)) {
    target.copy_(received);
  }
}

at::Tensor direct(const at::Tensor& tensor, const char* what) {
  require_served(tensor, what, kHost);
  require_memory(tensor, what);
  return is_direct(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

at::Tensor lane_alias(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided ? tensor.variable_data() : tensor;
}

std::vector<at::Tensor> lane_aliases(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  all.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    all.push_back(lane_alias(tensor));
  }
  return all;
}

BufferView movable_view(const at::Tensor& tensor, const char* what, Device device) {
  require_served(tensor, what, device);
  switch (tensor.scalar_type()) {
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
    case at::kComplexHalf:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e8m0fnu: {
      require_memory(tensor, what);
      const std::size_t bytes = tensor.nbytes();
      if (device.type == DeviceType::kCpu) {  // ranks compare their dtypes
        return {tensor.data_ptr(), bytes, static_cast<std::size_t>(tensor.numel()), *movable_dtype_of(tensor), device};
      }
      return {tensor.data_ptr(), bytes, bytes, DType::kUInt8, device};
    }
    default:  // torch's enum, not ours: it grows
      return view_of(tensor, what, device);
  }
}

BufferView reducible_view(const at::Tensor& tensor, ReduceOp op, const char* what, Device device) {
  require_served(tensor, what, device);
  const bool is_sum = op == ReduceOp::kSum || op == ReduceOp::kAverage;
  if (is_sum && tensor.scalar_type() == at::kComplexHalf) {
    return view_of(at::view_as_real(tensor), what, device);
  }
  BufferView view = view_of(tensor, what, device);
  if (is_sum && device.type == DeviceType::kCuda) {  // host transports know it, and ranks compare their dtypes
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

namespace {

// The place of an operation in kComposedOperations.
std::int8_t place_of(const std::string& operation) {
  const auto* const found = std::find(kComposedOperations.begin(), kComposedOperations.end(), operation);
  HPCOMM_ASSERT(found != kComposedOperations.end(), operation, " is not made of several operations");
  return static_cast<std::int8_t>(found - kComposedOperations.begin());
}

}  // namespace

Step::Step(HostCommunicator& communicator, Mailbox* mailbox, const ErrorContext& what, Deadline deadline)
    : communicator_(communicator),
      mailbox_(mailbox),
      what_(what),
      deadline_(deadline),
      // Signals are the business of the thread that waits for us, when this is the lane.
      poll_(communicator.stream().is_current() ? communicator.lane_poll() : &check_signals) {}

std::chrono::milliseconds Step::left() const {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
  return std::max(left, std::chrono::milliseconds(1));
}

OpOptions Step::options() const {
  OpOptions options;
  options.timeout = left();
  options.poll = poll_;
  options.is_step = true;
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
  opening.opens_composed = place_of(what_.operation);
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
              str(title_of(what_, communicator_.lane()), ": ranks disagree: rank ", job_ranks[rank], " called ", one,
                  ", rank ", job_ranks[peer], " called ", other, "; no data has moved and the group is usable"),
              std::move(context));
}

// What a rank says of its call, in Step::agree() and Step::agree_on_all().
struct Step::Description {
  std::int64_t type;  // below 0: a fingerprint of the dtypes and sizes of `count` tensors
  std::int64_t root;
  std::int64_t count;
  std::int64_t operation;  // its place in kComposedOperations

  [[nodiscard]] std::string text() const {
    const char* what = kComposedOperations[static_cast<std::size_t>(operation)];
    if (type < 0) {
      return str(what, " of ", count, " tensors");
    }
    if (count < 0) {
      return str(what, " with a list that it refused");
    }
    const auto dtype = static_cast<at::ScalarType>(type);
    std::string text = str(what, "(", count, " x ", c10::toString(dtype));
    if (root >= 0) {
      text += str(", root ", root);
    }
    return text + ")";
  }
};

void Step::agree(const at::Tensor& tensor, int root, std::int64_t count) {
  (void)compare({static_cast<std::int64_t>(tensor.scalar_type()), root, count, 0});
}

void Step::refuse(const at::Tensor& tensor, int root, const std::string& why) {
  try {
    agree(tensor, root, -1);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kSchemaMismatch) {
      throw;
    }
  }
  throw Error(ErrorKind::kInvalidArgument, why, what_);
}

void Step::agree_on_all(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> each;
  std::uint64_t print = 14695981039346656037ULL;  // FNV-1a, a number at a time
  for (const auto& tensor : tensors) {
    each.push_back((static_cast<std::int64_t>(tensor.numel()) << 8) | static_cast<std::int64_t>(tensor.scalar_type()));
    print = (print ^ static_cast<std::uint64_t>(each.back())) * 1099511628211ULL;
  }
  const Description mine{static_cast<std::int64_t>(print | (std::uint64_t{1} << 63)), -1,
                         static_cast<std::int64_t>(tensors.size()), 1};
  if (compare(mine)) {
    return;
  }
  // As many everywhere, but not alike, as all ranks know: then they look at each.
  const auto all = show(each);
  for (int peer = 1; peer < size(); ++peer) {
    for (std::size_t i = 0; i < each.size(); ++i) {
      const auto of = [&](int member) { return all[static_cast<std::size_t>(member) * each.size() + i]; };
      if (of(peer) != of(0)) {
        const auto text = [&](int member) {
          return str(what_.operation, " of ", each.size(), " tensors, number ", i, " with ", of(member) >> 8, " x ",
                     c10::toString(static_cast<at::ScalarType>(of(member) & 0xff)));
        };
        mismatch(0, text(0), static_cast<std::size_t>(peer), text(peer));
      }
    }
  }
  HPCOMM_ASSERT(false, "ranks with equal tensors and different fingerprints of them");
}

bool Step::compare(Description mine) {
  mine.operation = place_of(what_.operation);
  const auto all = show({mine.type, mine.root, mine.count, mine.operation});
  bool alike = true;
  for (int peer = 1; peer < size(); ++peer) {
    const auto at = [&](int member) {
      const auto* words = all.data() + std::ptrdiff_t{4} * member;
      return Description{words[0], words[1], words[2], words[3]};
    };
    const Description first = at(0);
    const Description other = at(peer);
    const bool same_but_type = std::equal(all.begin() + 1, all.begin() + 4, all.begin() + std::ptrdiff_t{4} * peer + 1);
    if (same_but_type && first.type < 0 && other.type < 0) {
      alike = alike && first.type == other.type;
    } else if (!same_but_type || first.type != other.type) {
      mismatch(0, first.text(), static_cast<std::size_t>(peer), other.text());
    }
  }
  return alike;
}

void Step::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  communicator_.all_reduce(reducible_view(tensor, op, what_.operation.c_str(), kHost), op, options())->wait();
}

void Step::all_gather(const at::Tensor& output, const at::Tensor& input) const {
  const char* what = what_.operation.c_str();
  const at::Tensor from = overlap_elsewhere(output, input, rank()) ? input.clone() : input;
  communicator_.all_gather(movable_view(output, what, kHost), movable_view(from, what, kHost), options())->wait();
}

void Step::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  const char* what = what_.operation.c_str();
  const bool apart = !overlap_elsewhere(input, output, rank());
  const at::Tensor to = apart ? output : at::empty(output.sizes(), output.options());
  communicator_
      .reduce_scatter(reducible_view(to, op, what, kHost), reducible_view(input, op, what, kHost), op, options())
      ->wait();
  if (!apart) {
    output.copy_(to);
  }
}

void Step::all_to_all(const at::Tensor& output, const at::Tensor& input) const {
  const char* what = what_.operation.c_str();
  const bool shifted = input.const_data_ptr() != output.const_data_ptr() && overlap_any({output}, {input}).front();
  const at::Tensor from = shifted ? input.clone() : input;
  communicator_.all_to_all(movable_view(output, what, kHost), movable_view(from, what, kHost), options())->wait();
}

void Step::broadcast(const at::Tensor& tensor, int root) const {
  communicator_.broadcast(movable_view(tensor, what_.operation.c_str(), kHost), root, options())->wait();
}

MailOptions Step::mail_options(const at::Tensor& tensor) const {
  HPCOMM_ASSERT(mailbox_ != nullptr, "the ", communicator_.transport(), " transport carries no messages");
  MailOptions mail;
  mail.timeout = left();
  mail.keepalive = keep(tensor);
  return mail;
}

void Step::send(const at::Tensor& contiguous, int peer) {
  if (contiguous.numel() > 0) {
    const BufferView view = movable_view(contiguous, what_.operation.c_str(), kHost);
    const MailOptions mail = mail_options(contiguous);
    messages_.push_back(mailbox_->send(view, peer, tag_, mail));
  }
}

void Step::recv(const at::Tensor& contiguous, int peer) {
  if (contiguous.numel() > 0) {
    const BufferView view = movable_view(contiguous, what_.operation.c_str(), kHost);
    const MailOptions mail = mail_options(contiguous);
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
