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

std::string edge_name(const Communicator& communicator, int from, int to) {
  return str("edge ", job_rank(communicator, from), "->", job_rank(communicator, to));
}

// What `read` finds in bytes that came. Who finds them damaged does not know whose they are.
template <typename Read>
auto read_of(const Inbound& inbound, std::uint64_t sequence, const Read& read) {
  try {
    return read();
  } catch (const Error& why) {
    if (why.kind() != ErrorKind::kProtocol) {
      throw;
    }
    throw Error(ErrorKind::kProtocol, str(message_name(inbound.name(), sequence, -1), ": ", why.what()),
                inbound.communicator.context("recv", inbound.peer, sequence));
  }
}

// The Control channel on which a sender says, when it is gone, how many messages it has sent.
std::uint64_t farewell_of(std::uint64_t edge) { return Fingerprint().add("farewell").add_int(edge).value(); }

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

bool SendEdge::is_under_way() const {
  std::erase_if(under_way_, [](const WorkPtr& work) { return work->done(); });
  return (!under_way_.empty() || route_->is_looked_for()) && !refusal_->is_closed(sequence_ - 1);
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
      std::erase_if(under_way_, [](const WorkPtr& one) { return one->done(); });
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

Inbound::Inbound(const EdgeConfig& config, std::uint64_t edge_id)
    : communicator(*config.communicator),
      peer(config.peer),
      id(edge_id),
      mode(config.mode),
      max_bytes(config.max_bytes),
      refusal(config.communicator, config.peer, edge_id) {}

std::string Inbound::name() const { return edge_name(communicator, peer, communicator.rank()); }

void Inbound::require_due(const MessageHeader& header, std::uint64_t sequence) const {
  if (header.edge == id && header.sequence < sequence) {
    throw Error(ErrorKind::kProtocol, str(name(), ": message #", header.sequence, " was received before, its header ",
                                          "was repeated; #", sequence, " is due"));
  }
  if (header.edge != id || header.sequence != sequence) {
    // Whole, and of this version: the two ends count differently.
    throw Error(ErrorKind::kSchemaMismatch,
                str(name(), ": message #", header.sequence, " of edge ", header.edge, " came where #", sequence,
                    " of edge ", id, " was due; do both ranks make their channels in the same order?"),
                communicator.context("recv", peer, sequence));
  }
}

KnownPtr Inbound::accept(const MessageHeader& header, std::string_view schema, std::uint64_t sequence, int microbatch) {
  require_due(header, sequence);
  at_hand = header.microbatch;
  KnownPtr known = schema_of(header, schema, sequence);
  const auto differs = [&](const std::string& how) {
    throw Error(ErrorKind::kSchemaMismatch, how, communicator.context("recv", peer, sequence));
  };
  if (header.frozen != (mode == SchemaMode::kFrozen)) {
    const auto what = [](bool frozen) { return frozen ? "frozen" : "per_message"; };
    differs(str(message_name(name(), sequence, header.microbatch), ": the sender's end was made with schema=\"",
                what(header.frozen), "\", this rank's with schema=\"", what(!header.frozen), '"'));
  }
  if (microbatch >= 0 && header.microbatch != microbatch) {
    missed = microbatch;
    differs(str(name(), " delivered microbatch ", header.microbatch, " (", known->schema.to_text(),
                "), this rank expects microbatch ", microbatch, "; do all ranks run the same plan?"));
  }
  if (const std::string how = unlike_expected(known); !how.empty()) {
    differs(str(message_name(name(), sequence, header.microbatch), ": this rank expects another message: ", how));
  }
  if (mode == SchemaMode::kFrozen) {
    const std::lock_guard lock(expected_mutex);
    if (fixed != nullptr && known != fixed) {
      reject(sequence, str("message #", sequence, " has another schema than the first one, and it is frozen"));
    }
    fixed = known;
  }
  current = known;
  return known;
}

void Inbound::reject(std::uint64_t sequence, const std::string& why) const {
  throw Error(ErrorKind::kProtocol, name() + ": " + why, communicator.context("recv", peer, sequence));
}

KnownPtr Inbound::schema_of(const MessageHeader& header, std::string_view schema, std::uint64_t sequence) {
  if (schema.size() != header.schema_bytes) {
    reject(sequence, str("bytes behind the header: ", schema.size(), " instead of ", header.schema_bytes));
  }
  KnownPtr known;
  if (schema.empty()) {
    known = book.find(header.schema);
  } else {
    if (fingerprint_of(schema) != header.schema) {
      reject(sequence, "the schema does not match its fingerprint");
    }
    known = read_of(*this, sequence, [&] { return KnownSchema::read(schema, header.schema, current.get()); });
    if (book.add(known)) {
      found_like.clear();  // or it would hold what the book has let go of
    }
  }
  if (known == nullptr || known->parcel.bytes() != header.payload_bytes) {
    reject(sequence, str("message #", sequence, " has no schema that fits it"));
  }
  if (known->parcel.bytes() > max_bytes) {
    reject(sequence, str("message #", sequence, " has ", known->parcel.bytes(), " bytes as it travels, and this ",
                         "rank's end takes up to max_bytes=", max_bytes, "; make both ends alike"));
  }
  if (header.lent && known->parcel.packed.bytes() == 0) {
    reject(sequence, str("message #", sequence, " is lent and has nothing to lend"));
  }
  return known;
}

std::string Inbound::unlike_expected(const KnownPtr& known) {
  std::shared_ptr<const Schema> wanted;
  {
    const std::lock_guard lock(expected_mutex);
    wanted = expected;
  }
  if (wanted != like) {
    like = wanted;
    found_like.clear();
  }
  if (wanted == nullptr || std::find(found_like.begin(), found_like.end(), known) != found_like.end()) {
    return {};
  }
  std::string differs = difference(known->schema, *wanted, Compare::kKinds);
  if (differs.empty()) {
    found_like.push_back(known);
  }
  return differs;
}

void Inbound::expect(std::shared_ptr<const Schema> schema) {
  const std::lock_guard lock(expected_mutex);
  if (fixed != nullptr) {
    const std::string differs = difference(fixed->schema, *schema, Compare::kKinds);
    if (!differs.empty()) {
      throw Error(ErrorKind::kSchemaMismatch,
                  str(name(), ": this rank expects another message than the first one, which all others are like ",
                      "(schema=\"frozen\"): ", differs),
                  communicator.context("recv", peer, 0));
    }
  }
  expected = std::move(schema);
}

MessageHeader Inbound::header_in(std::string_view bytes, std::uint64_t sequence) const {
  return read_of(*this, sequence, [&] { return parse_header(bytes); });
}

bool Inbound::is_beyond_last(std::uint64_t sequence) {
  std::optional<std::string> text;
  try {
    if (sent_in_all == UINT64_MAX) {
      text = communicator.control().try_receive(job_rank(communicator, peer), farewell_of(id), Deadline{});
    }
  } catch (const Error&) {
    // The job has failed, or the peer has left: whoever waits says so.
  }
  if (text && text->size() == sizeof(std::uint64_t)) {
    std::uint64_t sent = 0;
    std::memcpy(&sent, text->data(), text->size());
    sent_in_all = sent;
  }
  return sequence >= sent_in_all;
}

void Inbound::check(std::uint64_t sequence, Deadline deadline) {
  if (auto why = communicator.aborted()) {
    throw communicator.ended_by(*why, communicator.context("recv", peer, sequence));
  }
  if (closed) {
    throw Error(ErrorKind::kClosed, name() + ": the channel was closed before the message came",
                communicator.context("recv", peer, sequence));
  }
  if (const Control& control = communicator.control(); control.has_left(control.rank())) {
    throw Error(ErrorKind::kClosed, name() + ": this rank's mesh was closed before the message came",
                communicator.context("recv", peer, sequence));
  }
  if (is_beyond_last(sequence)) {
    ErrorContext what = communicator.context("recv", peer, sequence);
    throw Error(ErrorKind::kPeerError,
                str(name(), ": rank ", what.peer, " has closed its end of this channel: no more messages come"), what);
  }
  if (Clock::now() >= deadline) {
    throw Error(ErrorKind::kTimedOut, name() + ": no message came in time; is the peer still computing?",
                communicator.context("recv", peer, sequence));
  }
}

void Inbound::fail(std::exception_ptr error) {
  if (broken) {
    return;
  }
  broken = error;
  try {
    std::rethrow_exception(error);
  } catch (const Error& why) {
    if (why.kind() == ErrorKind::kSchemaMismatch || why.kind() == ErrorKind::kProtocol) {
      refusal.tell(why, why.kind() == ErrorKind::kSchemaMismatch ? at_hand : -1);  // a damaged header says nothing
      // Its payload stays unread: what follows on this communicator would meet the wrong one.
      communicator.abort(why);
    } else {
      refusal.tell_closed(0);
    }
  } catch (...) {
    refusal.tell_closed(0);  // of this rank alone: a signal, most likely
  }
}

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
  if (!inbound.is_beyond_last(taken)) {  // else the sender is gone, and all that it sent is here
    inbound.refusal.tell_closed(goes_on ? taken : 0);
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

void RecvEdge::refuse(const Error& why, int microbatch) {
  route_->inbound().refusal.tell(why, microbatch);
  config_.communicator->abort(why);
}

void RecvEdge::expect(std::shared_ptr<const Schema> schema) { route_->inbound().expect(std::move(schema)); }

}  // namespace hpcomm
