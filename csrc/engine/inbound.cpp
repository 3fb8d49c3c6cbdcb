// Checks of headers and schemas that come, and the ways in which a receiving end ends.
#include "engine/inbound.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/hash.h"

namespace hpcomm {

namespace {

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

}  // namespace

std::string edge_name(const Communicator& communicator, int from, int to) {
  return str("edge ", job_rank(communicator, from), "->", job_rank(communicator, to));
}

std::uint64_t farewell_of(std::uint64_t edge) { return Fingerprint().add("farewell").add_int(edge).value(); }

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
    const std::lock_guard lock(expected_mutex_);
    if (fixed_ != nullptr && known != fixed_) {
      reject(sequence, str("message #", sequence, " has another schema than the first one, and it is frozen"));
    }
    fixed_ = known;
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
    known = book_.find(header.schema);
  } else {
    if (fingerprint_of(schema) != header.schema) {
      reject(sequence, "the schema does not match its fingerprint");
    }
    known = read_of(*this, sequence, [&] { return KnownSchema::read(schema, header.schema, current.get()); });
    if (book_.add(known)) {
      found_like_.clear();  // or it would hold what the book has let go of
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
    const std::lock_guard lock(expected_mutex_);
    wanted = expected_;
  }
  if (wanted != like_) {
    like_ = wanted;
    found_like_.clear();
  }
  if (wanted == nullptr || std::find(found_like_.begin(), found_like_.end(), known) != found_like_.end()) {
    return {};
  }
  std::string differs = difference(known->schema, *wanted, Compare::kKinds);
  if (differs.empty()) {
    found_like_.push_back(known);
  }
  return differs;
}

void Inbound::expect(std::shared_ptr<const Schema> schema) {
  const std::lock_guard lock(expected_mutex_);
  if (fixed_ != nullptr) {
    const std::string differs = difference(fixed_->schema, *schema, Compare::kKinds);
    if (!differs.empty()) {
      throw Error(ErrorKind::kSchemaMismatch,
                  str(name(), ": this rank expects another message than the first one, which all others are like ",
                      "(schema=\"frozen\"): ", differs),
                  communicator.context("recv", peer, 0));
    }
  }
  expected_ = std::move(schema);
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
      refusal.tell(why,
                   why.kind() == ErrorKind::kSchemaMismatch ? at_hand.load() : -1);  // a damaged header says nothing
      // Its payload stays unread: what follows on this communicator would meet the wrong one.
      communicator.abort(why);
    } else {
      refusal.tell_closed(taken);
    }
  } catch (...) {
    refusal.tell_closed(taken);  // of this rank alone: a signal, most likely
  }
}

}  // namespace hpcomm
