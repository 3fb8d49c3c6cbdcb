// The order in which a connection sends.
#include "control/outbox.h"

#include <algorithm>
#include <utility>

namespace hpcomm::control {

std::size_t Outbox::bytes() const noexcept {
  std::size_t sum = ahead_.size() - ahead_sent_ + head_.size() - head_sent_;
  for (const Letter& letter : letters_) {
    sum += letter.total - letter.at + (letter.total == 0 ? 1 : 0);  // also a frame without a body is to be sent
  }
  return sum;
}

void Outbox::add(FrameKind kind, std::uint64_t channel, std::string_view body) {
  const bool behind = kind == FrameKind::kGoodbye
                          ? !letters_.empty()
                          : kind == FrameKind::kMessage && (body.size() > kPieceBytes ||
                                                            std::any_of(letters_.begin(), letters_.end(),
                                                                        [&](auto& l) { return l.channel == channel; }));
  if (!behind) {
    const PrefixBytes prefix = encode_prefix(kind, channel, body.size());
    ahead_.append(prefix.data(), prefix.size());
    ahead_ += body;
    return;
  }
  Letter& letter = letters_.emplace_back();
  letter.kind = kind;
  letter.channel = channel;
  letter.own = body;
  letter.parts = {letter.own};
  letter.total = body.size();
}

void Outbox::add_rest(std::string_view bytes, std::string_view behind) {
  ahead_ += bytes;
  ahead_ += behind;
}

void Outbox::lend(std::uint64_t channel, LentBody body) {
  Letter& letter = letters_.emplace_back();
  letter.channel = channel;
  letter.total = body.bytes();
  letter.parts = std::move(body.parts);
  letter.sent = std::move(body.sent);
}

void Outbox::keep_last() {
  if (!letters_.empty()) {
    keep(letters_.back(), letters_.back().total - letters_.back().at);
  }
}

// The next `bytes` of the body; it ends there.
void Outbox::keep(Letter& letter, std::size_t bytes) {
  std::string own;
  own.reserve(bytes);
  for (std::size_t i = letter.part; own.size() < bytes; ++i) {
    const std::string_view rest = letter.parts[i].substr(i == letter.part ? letter.within : 0);
    own += rest.substr(0, bytes - own.size());
  }
  letter.own = std::move(own);
  letter.parts = {letter.own};
  letter.part = letter.within = 0;
  letter.total = letter.at + bytes;
}

void Outbox::begin_piece() {
  const Letter& letter = letters_.front();
  head_.clear();
  head_sent_ = 0;
  piece_left_ = std::min(letter.total - letter.at, kPieceBytes);
  const bool in_pieces = letter.total > kPieceBytes;
  if (in_pieces && letter.at == 0) {
    head_ = encode(FrameKind::kLong, letter.channel, encode_length(letter.total));
  }
  const PrefixBytes prefix = encode_prefix(in_pieces ? FrameKind::kPiece : letter.kind, letter.channel, piece_left_);
  head_.append(prefix.data(), prefix.size());
}

std::size_t Outbox::next(std::span<iovec> parts) {
  std::size_t filled = 0;
  const auto put = [&](std::string_view bytes) {
    if (!bytes.empty()) {
      // const_cast: an iovec serves both directions.
      parts[filled++] = {const_cast<char*>(bytes.data()), bytes.size()};
    }
  };
  if (!in_piece()) {
    if (ahead_sent_ < ahead_.size()) {
      put(std::string_view(ahead_).substr(ahead_sent_));
      return filled;
    }
    if (letters_.empty()) {
      return 0;
    }
    begin_piece();
  }
  put(std::string_view(head_).substr(head_sent_));
  const Letter& letter = letters_.front();
  std::size_t left = piece_left_;
  for (std::size_t i = letter.part; left > 0 && filled < parts.size(); ++i) {
    const std::string_view rest = letter.parts[i].substr(i == letter.part ? letter.within : 0).substr(0, left);
    left -= rest.size();
    put(rest);
  }
  return filled;
}

void Outbox::took(std::size_t bytes, std::vector<Sent>& done) {
  if (!in_piece()) {
    ahead_sent_ += bytes;
    // Not after every piece: moving what is left of a large message each time would cost the square of its length.
    if (ahead_sent_ >= ahead_.size() / 2) {
      ahead_.erase(0, std::exchange(ahead_sent_, 0));
    }
    return;
  }
  const std::size_t of_head = std::min(bytes, head_.size() - head_sent_);
  head_sent_ += of_head;
  bytes -= of_head;
  Letter& letter = letters_.front();
  letter.at += bytes;
  piece_left_ -= bytes;
  while (bytes > 0) {
    const std::size_t now = std::min(bytes, letter.parts[letter.part].size() - letter.within);
    letter.within += now;
    bytes -= now;
    if (letter.within == letter.parts[letter.part].size()) {
      ++letter.part;
      letter.within = 0;
    }
  }
  if (!in_piece() && letter.at == letter.total) {
    if (letter.sent != nullptr) {
      done.push_back(std::move(letter.sent));
    }
    letters_.pop_front();
  }
}

std::vector<Outbox::Sent> Outbox::let_go() {
  std::vector<Sent> told;
  std::deque<Letter> kept;
  for (std::size_t i = 0; i < letters_.size(); ++i) {
    Letter& letter = letters_[i];
    if (letter.sent != nullptr) {
      told.push_back(std::exchange(letter.sent, nullptr));
    }
    const bool begun = i == 0 && in_piece();
    if (begun || letter.kind == FrameKind::kGoodbye) {
      keep(letter, begun ? piece_left_ : letter.total - letter.at);
      Letter& moved = kept.emplace_back(std::move(letter));
      moved.parts = {moved.own};
    }
  }
  letters_ = std::move(kept);
  return told;
}

std::vector<Outbox::Sent> Outbox::clear() {
  std::vector<Sent> told;
  for (Letter& letter : letters_) {
    if (letter.sent != nullptr) {
      told.push_back(std::move(letter.sent));
    }
  }
  letters_.clear();
  ahead_.clear();
  head_.clear();
  ahead_sent_ = head_sent_ = piece_left_ = 0;
  return told;
}

}  // namespace hpcomm::control
