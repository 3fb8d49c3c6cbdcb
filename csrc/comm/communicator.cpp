// Checks, sequence numbers and names that all transports share.
#include "comm/communicator.h"

#include <algorithm>
#include <new>
#include <sstream>
#include <utility>

#include "base/hash.h"
#include "base/host_memory.h"
#include "comm/issued.h"

namespace hpcomm {

const char* Communicator::operation_name(Operation::Kind kind) noexcept {
  switch (kind) {
    case Operation::Kind::kAllReduce:
      return "all_reduce";
    case Operation::Kind::kReduceScatter:
      return "reduce_scatter";
    case Operation::Kind::kAllGather:
      return "all_gather";
    case Operation::Kind::kBroadcast:
      return "broadcast";
    case Operation::Kind::kAllToAll:
      return "all_to_all";
    case Operation::Kind::kSend:
      return "send";
    case Operation::Kind::kRecv:
      return "recv";
    case Operation::Kind::kSendRecv:
      return "sendrecv";
    case Operation::Kind::kBarrier:
      return "barrier";
  }
  return "unknown";
}

bool Communicator::is_message(Operation::Kind kind) noexcept {
  return kind == Operation::Kind::kSend || kind == Operation::Kind::kRecv || kind == Operation::Kind::kSendRecv;
}

std::vector<Issued> Communicator::issued_by(const Operation& operation) const {
  using Kind = Operation::Kind;
  if (operation.kind == Kind::kSendRecv) {
    std::vector<Issued> ends = issued_by(operation.sending());
    for (Issued& end : issued_by(operation.receiving())) {
      ends.push_back(std::move(end));
    }
    return ends;
  }
  const char* const name = operation_name(operation.kind);
  const ErrorContext what = context(name, operation.peer, operation.sequence);
  const bool receives = operation.kind == Kind::kRecv;
  const BufferView& view = receives ? operation.output : operation.input;
  if (is_message(operation.kind)) {
    if (view.bytes == 0) {
      return {};
    }
    return {{what, operation.peer, !receives, elements_of(view.count, to_string(view.dtype))}};
  }
  if (operation.kind == Kind::kBarrier) {
    return {{what, -1, false, name}};
  }
  const bool reduces = operation.kind == Kind::kAllReduce || operation.kind == Kind::kReduceScatter;
  return {{what, -1, false,
           words_of_collective(name, view.count, to_string(view.dtype),
                               reduces ? std::optional(operation.op) : std::nullopt,
                               operation.kind == Kind::kBroadcast ? operation.peer : -1) +
               words_of_label(reduces ? operation.options.label() : -1)}};
}

Communicator::Operation Communicator::Operation::sending() const {
  return {Kind::kSend, {}, input, op, peer, sequence, options};
}

Communicator::Operation Communicator::Operation::receiving() const {
  return {Kind::kRecv, output, {}, op, source, source_sequence, options};
}

Communicator::Communicator(CommunicatorConfig config)
    : config_(std::move(config)), sent_(config_.ranks.size()), received_(config_.ranks.size()) {
  HPCOMM_REQUIRE(config_.rank >= 0 && config_.rank < size(), "communicator: rank ", config_.rank, " of ", size());
  HPCOMM_REQUIRE(config_.stream != nullptr && config_.control != nullptr, "communicator: no stream or no Control");
  if (config_.compute == nullptr) {
    config_.compute = make_caller_stream();
  }
}

ErrorContext Communicator::context(const char* operation, int peer, std::uint64_t sequence) const {
  const int self = config_.ranks[static_cast<std::size_t>(config_.rank)];
  const int other = peer < 0 ? -1 : config_.ranks[static_cast<std::size_t>(peer)];
  return {self, other, static_cast<long long>(sequence), operation};
}

Error Communicator::ended_by(const Error& why, const ErrorContext& what) const {
  const bool is_of_job = why.kind() == ErrorKind::kRankFailed || why.kind() == ErrorKind::kPeerError;
  const bool is_of_a_wait = why.kind() == ErrorKind::kTimedOut && why.context().operation.empty();
  if ((!is_of_job && !is_of_a_wait) || why.context().operation == what.operation) {
    return why;
  }
  ErrorContext ended = what;
  ended.peer = why.context().peer;
  return as_end_of(std::move(ended), lane(), why);
}

void Communicator::require_peer(const char* operation, int peer) const {
  HPCOMM_REQUIRE(peer >= 0 && peer < size() && peer != rank(), operation, ": rank ", rank(), " of ", size(),
                 " has no peer ", peer, "; peers are the other ranks of the communicator");
}

void Communicator::require_factor(const char* operation, DType dtype, ReduceOp op, const OpOptions& options) const {
  HPCOMM_REQUIRE(options.factor == nullptr || (premultiplies() && op == ReduceOp::kSum && is_floating(dtype)),
                 operation,
                 " with a factor: only sums of floats have one, on transports that multiply on the way; this is ",
                 to_string(op), " of ", to_string(dtype), " on ", transport());
}

namespace {

void require_in_place(const char* operation, const BufferView& whole, const BufferView& part, int rank) {
  HPCOMM_REQUIRE(are_apart_or_in_place(whole, part, rank), operation,
                 ": tensor and output overlap, and the smaller one is not part ", rank,
                 " of the other, which is where this rank's may be; give it memory of its own");
}

}  // namespace

WorkPtr Communicator::issue(Operation operation) {
  switch (operation.kind) {
    case Operation::Kind::kSend:
      operation.sequence = sent_[static_cast<std::size_t>(operation.peer)]++;
      break;
    case Operation::Kind::kRecv:
      operation.sequence = received_[static_cast<std::size_t>(operation.peer)]++;
      break;
    case Operation::Kind::kSendRecv:
      operation.sequence = sent_[static_cast<std::size_t>(operation.peer)]++;
      operation.source_sequence = received_[static_cast<std::size_t>(operation.source)]++;
      break;
    case Operation::Kind::kAllReduce:
    case Operation::Kind::kReduceScatter:
    case Operation::Kind::kAllGather:
    case Operation::Kind::kBroadcast:
    case Operation::Kind::kAllToAll:
    case Operation::Kind::kBarrier:
      operation.sequence = collectives_++;
      break;
  }
  if (!operation.options.ready.empty()) {
    stream().wait(std::exchange(operation.options.ready, {}));
  }
  return submit(std::move(operation));
}

WorkPtr Communicator::all_reduce(const BufferView& buffer, ReduceOp op, const OpOptions& options) {
  require_factor("all_reduce", buffer.dtype, op, options);
  return issue({Operation::Kind::kAllReduce, buffer, buffer, op, -1, 0, options});
}

WorkPtr Communicator::reduce_scatter(const BufferView& output, const BufferView& input, ReduceOp op,
                                     const OpOptions& options) {
  HPCOMM_REQUIRE(input.count == output.count * static_cast<std::size_t>(size()) && input.dtype == output.dtype,
                 "reduce_scatter over ", size(), " ranks: input has ", input.count, " ", to_string(input.dtype),
                 " elements, output ", output.count, " ", to_string(output.dtype));
  require_factor("reduce_scatter", input.dtype, op, options);
  require_in_place("reduce_scatter", input, output, rank());
  return issue({Operation::Kind::kReduceScatter, output, input, op, -1, 0, options});
}

WorkPtr Communicator::all_gather(const BufferView& output, const BufferView& input, const OpOptions& options) {
  HPCOMM_REQUIRE(output.count == input.count * static_cast<std::size_t>(size()) && input.dtype == output.dtype,
                 "all_gather over ", size(), " ranks: input has ", input.count, " ", to_string(input.dtype),
                 " elements, output ", output.count, " ", to_string(output.dtype));
  require_in_place("all_gather", output, input, rank());
  return issue({Operation::Kind::kAllGather, output, input, ReduceOp::kSum, -1, 0, options});
}

WorkPtr Communicator::broadcast(const BufferView& buffer, int root, const OpOptions& options) {
  HPCOMM_REQUIRE(root >= 0 && root < size(), "broadcast: root ", root, " of ", size(), " ranks");
  return issue({Operation::Kind::kBroadcast, buffer, buffer, ReduceOp::kSum, root, 0, options});
}

WorkPtr Communicator::all_to_all(const BufferView& output, const BufferView& input, const OpOptions& options) {
  HPCOMM_REQUIRE(
      output.count == input.count && input.dtype == output.dtype && input.count % static_cast<std::size_t>(size()) == 0,
      "all_to_all over ", size(), " ranks: input has ", input.count, " ", to_string(input.dtype), " elements, output ",
      output.count, " ", to_string(output.dtype));
  HPCOMM_REQUIRE(are_apart(input, output) || input.data == output.data,
                 "all_to_all: tensor and output overlap in part; give one of them memory of its own");
  return issue({Operation::Kind::kAllToAll, output, input, ReduceOp::kSum, -1, 0, options});
}

WorkPtr Communicator::send(const BufferView& buffer, int peer, const OpOptions& options) {
  require_peer("send", peer);
  return issue({Operation::Kind::kSend, {}, buffer, ReduceOp::kSum, peer, 0, options});
}

WorkPtr Communicator::recv(const BufferView& buffer, int peer, const OpOptions& options) {
  require_peer("recv", peer);
  return issue({Operation::Kind::kRecv, buffer, {}, ReduceOp::kSum, peer, 0, options});
}

WorkPtr Communicator::sendrecv(const BufferView& input, int to, const BufferView& output, int from,
                               const OpOptions& options) {
  require_peer("sendrecv", to);
  require_peer("sendrecv", from);
  HPCOMM_REQUIRE(are_apart(input, output),
                 "sendrecv: tensor and output overlap; both move at once, so they need memory of their own");
  return issue({Operation::Kind::kSendRecv, output, input, ReduceOp::kSum, to, 0, options, from});
}

WorkPtr Communicator::barrier(const OpOptions& options) {
  return issue({Operation::Kind::kBarrier, {}, {}, ReduceOp::kSum, -1, 0, options});
}

std::uint64_t Communicator::next_edge_id(int from, int to) {
  require_peer("edge", from == rank() ? to : from);
  Fingerprint hash;
  hash.add(config_.name).add_int(static_cast<std::uint64_t>(from)).add_int(static_cast<std::uint64_t>(to));
  return hash.add_int(static_cast<std::uint64_t>(edges_[{from, to}]++)).value();
}

CommunicatorConfig Communicator::child_config(const std::vector<int>& members, const std::string& lane) {
  CommunicatorConfig child = config_;
  child.ranks.clear();
  child.rank = -1;
  std::string label = lane;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const int member = members[i];
    HPCOMM_REQUIRE(member >= 0 && member < size(), "subgroup: rank ", member, " of ", size());
    HPCOMM_REQUIRE(std::count(members.begin(), members.end(), member) == 1, "subgroup: rank ", member,
                   " is named twice");
    child.ranks.push_back(config_.ranks[static_cast<std::size_t>(member)]);
    label += str(i == 0 ? ":" : ",", child.ranks.back());
    if (member == rank()) {
      child.rank = static_cast<int>(i);
    }
  }
  HPCOMM_REQUIRE(child.rank >= 0, "subgroup: rank ", rank(), " is not among the members");
  // All members have made the same subgroups of this communicator before, so they count alike.
  child.name = str(config_.name, "/", label, "#", children_[label]++);
  child.lane = lane;
  child.stream = config_.make_stream ? config_.make_stream(lane) : make_worker_stream("hpcomm:" + lane);
  return child;
}

std::shared_ptr<Communicator> Communicator::subgroup(const std::vector<int>& members, const std::string& lane) {
  const ErrorContext what = context("subgroup", -1, subgroups_++);
  CommunicatorConfig child = child_config(members, lane);
  try {
    return make_child(std::move(child));
  } catch (const Error& why) {
    const std::string& of = why.context().operation;
    if (of == "abort" || of == "heartbeat") {  // Control's; a transport says what it was at
      throw ended_by(why, what);
    }
    throw;
  }
}

std::shared_ptr<Communicator> Communicator::make_part(CommunicatorConfig part) { return make_child(std::move(part)); }

std::shared_ptr<Communicator> Communicator::split(int color, int key, const std::optional<std::string>& lane) {
  const ErrorContext what = context("split", -1, splits_);
  require_open(what);
  const std::string& mine = lane ? *lane : config_.lane;
  // Everybody learns everybody's choice; each then computes the same groups. Through Control, which needs no device.
  const std::uint64_t channel = Fingerprint().add(name()).add("split").add_int(splits_++).value();
  const auto choices = in_words_of(*this, what, [&] {
    return control().exchange(ranks(), channel, str(color, ' ', key, ' ', mine), deadline_after(timeout()),
                              config_.poll);
  });
  std::vector<std::pair<int, int>> chosen;
  std::map<int, std::pair<int, std::string>> lanes;  // color: the job's rank that passed it first, and its lane
  for (int r = 0; r < size(); ++r) {
    std::istringstream choice(choices[static_cast<std::size_t>(r)]);
    int their_color = 0;
    int their_key = 0;
    std::string theirs;
    const int job_rank = config_.ranks[static_cast<std::size_t>(r)];
    if (!(choice >> their_color >> their_key) || choice.get() != ' ') {
      throw Error(ErrorKind::kProtocol, str("split: rank ", job_rank, " sent no color, key and lane"), what);
    }
    std::getline(choice, theirs, '\0');
    const auto& [first, agreed] = lanes.try_emplace(their_color, job_rank, theirs).first->second;
    if (agreed != theirs) {
      control().let_all_find_out(ranks(), Fingerprint().add(name()).add("split apart").value(), config_.poll);
      // On all ranks, also those of other colors: NCCL makes the parts of all of them at once, or none.
      throw Error(ErrorKind::kSchemaMismatch,
                  str("split: ranks of color ", their_color, " want different lanes: rank ", first, " has \"", agreed,
                      "\", rank ", job_rank, " has \"", theirs, '"'),
                  what);
    }
    if (their_color == color) {
      chosen.emplace_back(their_key, r);
    }
  }
  std::sort(chosen.begin(), chosen.end());
  std::vector<int> members;
  for (const auto& choice : chosen) {
    members.push_back(choice.second);
  }
  return make_part(child_config(members, mine));
}

Buffer Communicator::allocate(std::size_t bytes) {
  if (auto memory = host_memory(bytes)) {
    return *std::move(memory);
  }
  throw Error(ErrorKind::kTransport, str("allocate: no ", bytes, " bytes of memory"));
}

}  // namespace hpcomm
