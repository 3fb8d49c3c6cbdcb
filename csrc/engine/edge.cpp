// Both ends of an edge: what is checked, counted and remembered, whatever the way the messages take.
#include "engine/edge.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "engine/route.h"

namespace hpcomm {

namespace {

// Memory that both ends see would carry messages also when this rank's Control is closed.
void require_in_job(const Communicator& communicator, const ErrorContext& what) {
  if (communicator.control().has_left(what.rank)) {
    throw Error(ErrorKind::kClosed,
                str(what.operation, " #", what.sequence, " on a channel: this rank has left the job"), what);
  }
}

EdgeConfig checked(EdgeConfig config) {
  const Communicator& communicator = *config.communicator;
  HPCOMM_REQUIRE(config.peer >= 0 && config.peer < communicator.size() && config.peer != communicator.rank(),
                 "an edge of rank ", communicator.rank(), " of ", communicator.size(), " has no peer ", config.peer);
  HPCOMM_REQUIRE(config.slots > 0 && config.slots <= EdgeConfig::kMostSlots, "an edge has 1 to ",
                 EdgeConfig::kMostSlots, " slots, not ", config.slots);
  return config;
}

}  // namespace

// What travels as it is goes out while what comes behind it is packed, if there is anything to pack, and is read where
// it will lie. Over a socket that counts for more than the messages that are saved.
std::uint64_t usual_direct_from(const Communicator& communicator) {
  constexpr std::uint64_t kOverSockets = std::uint64_t{256} << 10;
  return std::string_view(communicator.transport()) == "c10d" ? kOverSockets : kDirectFrom;
}

std::string message_name(const std::string& edge, std::uint64_t sequence, int microbatch) {
  return str(edge, ", message #", sequence, microbatch < 0 ? "" : str(", microbatch ", microbatch));
}

// --- sending ---------------------------------------------------------------------------------------------------------

SendEdge::SendEdge(EdgeConfig config, std::shared_ptr<Allocator> allocator)
    : config_(checked(std::move(config))),
      id_(config_.communicator->next_edge_id(config_.communicator->rank(), config_.peer)),
      refusal_(std::make_shared<Refusal>(config_.communicator, config_.peer, id_)),
      route_(make_mail_send(config_, allocator, id_, refusal_)) {
  if (route_ == nullptr) {
    route_ = make_lane_send(config_, std::move(allocator), id_, refusal_);
  }
}

SendEdge::~SendEdge() { leave(); }

void SendEdge::leave() noexcept {
  if (std::exchange(has_left_, true)) {
    return;
  }
  try {
    const Communicator& communicator = *config_.communicator;
    if (refusal_->is_closed(sequence_)) {
      return;  // the receiver waits for nothing more: it would stay in Control for ever
    }
    communicator.control().send(job_rank(communicator, config_.peer), farewell_of(id_),
                                {reinterpret_cast<const char*>(&sequence_), sizeof sequence_});
  } catch (const std::exception&) {
    // The job has failed, or the peer has left: it learns of that.
  }
}

std::size_t SendEdge::slot_bytes() const { return route_->slot_bytes(); }

void SendEdge::forget_ended() const {
  std::erase_if(under_way_, [this](const WorkPtr& work) {
    if (!work->done()) {
      return false;
    }
    failed_ += work->device().type == DeviceType::kCpu && !has_ended_well(*work) ? 1 : 0;
    return true;
  });
}

bool SendEdge::is_under_way() const {
  forget_ended();
  return (!under_way_.empty() || route_->is_looked_for()) && !refusal_->is_closed(sequence_ - 1);
}

std::size_t SendEdge::untaken() const {
  const bool may_be_taken = is_under_way();
  return failed_ + (may_be_taken ? under_way_.size() : 0);
}

void SendEdge::check_refused(int microbatch) const { refusal_->check_for(microbatch); }

void SendEdge::refuse(int microbatch, const std::string& why) const {
  const Communicator& communicator = *config_.communicator;
  throw Error(
      ErrorKind::kInvalidArgument,
      str("send: ", message_name(edge_name(communicator, communicator.rank(), config_.peer), sequence_, microbatch),
          ": ", why),
      communicator.context("send", config_.peer, sequence_));
}

// What this rank itself wrote is damaged in no other way than that it says more than can be.
KnownPtr SendEdge::read_own(std::string_view schema, std::uint64_t fingerprint, int microbatch) const {
  try {
    return KnownSchema::read(schema, fingerprint, last_.get());
  } catch (const Error& why) {
    if (why.kind() != ErrorKind::kProtocol) {
      throw;
    }
    refuse(microbatch, str("it cannot travel (", why.what(),
                           "); a tensor that was expanded travels whole: send what it was expanded from"));
  }
}

WorkPtr SendEdge::send(const Schema& schema, std::vector<Source> tensors, Keepalive keepalive, int microbatch) {
  return send(encode_schema(schema), std::move(tensors), std::move(keepalive), microbatch);
}

WorkPtr SendEdge::send(std::string_view schema, std::vector<Source> tensors, Keepalive keepalive, int microbatch) {
  Communicator& communicator = *config_.communicator;
  refusal_->check_sometimes(sequence_);
  Outgoing message;
  bool first = false;
  if (last_ != nullptr && last_->bytes == schema) {
    message.known = last_;
  } else {
    if (schema.size() > kMaxSchemaBytes) {
      refuse(microbatch, str("the structure of this message, without its tensors' values, takes ", schema.size(),
                             " bytes, and at most ", kMaxSchemaBytes, " travel; send fewer tensors, keys and texts in ",
                             "one message, or long texts as tensors of bytes"));
    }
    const std::uint64_t fingerprint = fingerprint_of(schema);
    message.known = book_.find(fingerprint);
    first = message.known == nullptr || message.known->bytes != schema;
    if (first) {
      message.known = read_own(schema, fingerprint, microbatch);
    }
  }
  const KnownSchema& known = *message.known;
  const bool frozen = config_.mode == SchemaMode::kFrozen && sequence_ > 0;
  message.what = communicator.context("send", config_.peer, sequence_);
  communicator.require_open(message.what);  // a route may pass by the communicator's operations
  require_in_job(communicator, message.what);
  if (frozen && message.known != last_) {
    throw Error(ErrorKind::kSchemaMismatch,
                str(message_name(edge_name(communicator, communicator.rank(), config_.peer), sequence_, microbatch),
                    ": the schema is frozen and this message has another one: ",
                    difference(known.schema, last_->schema, Compare::kEverything),
                    "; use schema=\"per_message\" where shapes change"),
                message.what);
  }
  HPCOMM_REQUIRE(tensors.size() == known.schema.tensors.size(), "the schema has ", known.schema.tensors.size(),
                 " tensors, got ", tensors.size());
  if (known.parcel.bytes() > config_.max_bytes) {
    refuse(microbatch,
           str("this message has ", known.parcel.bytes(), " bytes as it travels, and this rank's end takes ",
               "up to max_bytes=", config_.max_bytes, "; send it in parts, or make both ends with more"));
  }
  if (!frozen || route_->has_header(known.parcel)) {
    message.header =
        MessageHeader{id_, sequence_, microbatch, known.fingerprint, known.parcel.bytes(), 0, std::nullopt};
    message.header->frozen = config_.mode == SchemaMode::kFrozen;
    if (first) {
      message.header->schema_bytes = static_cast<std::uint32_t>(schema.size());
    }
  }
  message.sources = std::move(tensors);
  message.keepalive = std::move(keepalive);
  const KnownPtr sent = message.known;
  WorkPtr work = route_->send(std::move(message));
  // Not before: what was not issued, the receiver does not know.
  if (first) {
    book_.add(sent);
  }
  last_ = sent;
  if (device().type == DeviceType::kCuda) {
    under_way_.assign(1, work);  // a lane runs them in order: when the last one has ended, all have
  } else if (!work->done()) {
    if (under_way_.size() >= look_at_) {  // as often as they double, or a sender far ahead would do nothing else
      forget_ended();
      look_at_ = 2 * under_way_.size() + 1;
    }
    under_way_.push_back(work);
  }
  ++sequence_;
  return work;
}

std::vector<CopyItem> pack_items(const Outgoing& message, char* target, Reader reader) {
  const Parcel& parcel = message.known->parcel;
  std::vector<CopyItem> items;
  items.reserve(parcel.packed_tensors.size());
  for (std::size_t i = 0; i < parcel.packed_tensors.size(); ++i) {
    const Layout::Entry& entry = parcel.packed.entries()[i];
    const Source& source = message.sources[parcel.packed_tensors[i]];
    if (source.strided != nullptr) {
      source.strided->write(target + entry.offset, entry.wire);
    } else {
      items.push_back({source.data, target + entry.offset, entry.count, entry.dtype, entry.wire, reader});
    }
  }
  return items;
}

// --- receiving -------------------------------------------------------------------------------------------------------

void* Incoming::data(std::size_t i) const noexcept {
  const Parcel::Place& place = known->parcel.places[i];
  return place.area == Parcel::Area::kNowhere ? nullptr : static_cast<char*>(part(i).view.data) + place.offset;
}

const Keepalive& Incoming::owner(std::size_t i) const noexcept { return part(i).owner; }

const Buffer& Incoming::part(std::size_t i) const noexcept {
  switch (known->parcel.places[i].area) {
    case Parcel::Area::kNowhere:
    case Parcel::Area::kPacked:
      return packed;
    case Parcel::Area::kDirect:
      return direct;
    case Parcel::Area::kCast:
      return cast;
  }
  return packed;
}

std::vector<CopyItem> cast_items(const Incoming& message) {
  const Parcel& parcel = message.known->parcel;
  std::vector<CopyItem> items;
  for (std::size_t i = 0; i < parcel.packed_tensors.size(); ++i) {
    const Layout::Entry& entry = parcel.packed.entries()[i];
    if (entry.wire != entry.dtype) {
      items.push_back({static_cast<const char*>(message.packed.view.data) + entry.offset,
                       message.data(parcel.packed_tensors[i]), entry.count, entry.wire, entry.dtype});
    }
  }
  return items;
}

RecvEdge::RecvEdge(EdgeConfig config, std::shared_ptr<Allocator> allocator) : config_(checked(std::move(config))) {
  Communicator& communicator = *config_.communicator;
  auto inbound = std::make_shared<Inbound>(config_, communicator.next_edge_id(config_.peer, communicator.rank()));
  route_ = make_mail_recv(config_, allocator, inbound);
  if (route_ == nullptr) {
    route_ = make_lane_recv(config_, std::move(allocator), std::move(inbound));
  }
}

RecvEdge::~RecvEdge() {
  route_->inbound().closed = true;  // before the sender hears of it
  // A host does not take now what it has only asked for. A GPU goes on with what was issued, perhaps long before the
  // sender issues it.
  Inbound& inbound = route_->inbound();
  const bool goes_on = config_.communicator->device().type == DeviceType::kCuda;
  const std::uint64_t taken = goes_on ? sequence_.load() : inbound.taken.load();
  // What a lane is receiving now is taken, or it fails: the lane says so.
  const bool is_at_one = !goes_on && inbound.begun > taken;
  if (!is_at_one && !inbound.is_beyond_last(taken)) {  // else the sender is gone, and all that it sent is here
    inbound.refusal.tell_closed(taken);
  }
}

Receipt RecvEdge::recv(int microbatch, const OpOptions& options, const Meanwhile& meanwhile) {
  require_in_job(*config_.communicator, config_.communicator->context("recv", config_.peer, sequence_));
  const std::uint64_t sequence = sequence_++;  // before another thread's turn, which may come in there
  try {
    return route_->recv(sequence, microbatch, options, meanwhile);
  } catch (...) {
    // Nothing was asked for; if another thread had its turn already, what it asked for has no message before it.
    std::uint64_t next = sequence + 1;
    sequence_.compare_exchange_strong(next, sequence);
    throw;
  }
}

std::string RecvEdge::name() const { return route_->inbound().name(); }

int RecvEdge::missed() const noexcept { return route_->inbound().missed; }

int RecvEdge::came() const noexcept { return route_->inbound().at_hand; }

void RecvEdge::refuse(const Error& why, int microbatch) {
  route_->inbound().refusal.tell(why, microbatch);
  config_.communicator->abort(why);
}

void RecvEdge::expect(std::shared_ptr<const Schema> schema) { route_->inbound().expect(std::move(schema)); }

}  // namespace hpcomm
