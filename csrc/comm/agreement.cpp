// Words that meet through Control.
#include "comm/agreement.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/hash.h"
#include "comm/communicator.h"

namespace hpcomm {

namespace {

// How often one that waits for several looks at all of them.
constexpr auto kShortSlice = std::chrono::milliseconds(1);

std::uint64_t channel_of(const Communicator& communicator, const char* kind) {
  Fingerprint hash;
  return hash.add(communicator.name()).add("check").add(kind).value();
}

// A collective's number goes with its words: where they differ it tells who left one out. It is not compared. A call
// that one rank alone refused has taken a number there, and has moved nothing.
std::string numbered(const Issued& issued) { return str(issued.what.sequence, " ", issued.words); }

std::string number_of(const std::string& told) { return told.substr(0, told.find(' ')); }

std::string words_of(const std::string& told) { return told.substr(std::min(told.size(), told.find(' ')) + 1); }

std::string title(const Issued& issued, const Communicator& communicator) {
  return title_of(issued.what, communicator.lane());
}

}  // namespace

Agreement::Agreement(Communicator& communicator)
    : communicator_(communicator),
      collectives_(channel_of(communicator, "collectives")),
      differences_(channel_of(communicator, "differences")),
      senders_(channel_of(communicator, "senders")),
      receivers_(channel_of(communicator, "receivers")) {}

int Agreement::job_rank(int member) const { return communicator_.ranks()[static_cast<std::size_t>(member)]; }

Agreement::Results Agreement::meet(const std::vector<Issued>& issued, Deadline deadline, void (*poll)(),
                                   const std::function<void(std::size_t)>& fits) const {
  if (issued.empty()) {
    return {};
  }
  const ErrorContext& what = issued.front().what;
  const auto look = [&] {
    if (communicator_.aborted()) {  // a close() lets what was issued before it end
      communicator_.require_open(what);
    }
    if (poll != nullptr) {
      poll();
    }
  };
  try {
    Results results = exchange(issued, deadline, look, fits);
    for (std::size_t i = 0; i < issued.size(); ++i) {
      if (issued[i].peer < 0 && results[i]) {
        communicator_.control().let_all_find_out(communicator_.ranks(), differences_, poll);
      }
    }
    return results;
  } catch (const Error& error) {
    communicator_.abort(error);
    throw;
  } catch (...) {
    communicator_.abort(
        Error(ErrorKind::kClosed, str(title(issued.front(), communicator_), " was interrupted on this rank"), what));
    throw;
  }
}

Agreement::Results Agreement::exchange(const std::vector<Issued>& issued, Deadline deadline,
                                       const std::function<void()>& look,
                                       const std::function<void(std::size_t)>& fits) const {
  std::vector<Awaited> awaited;
  std::vector<std::vector<std::string>> told(issued.size());
  std::vector<std::size_t> left(issued.size());
  for (std::size_t i = 0; i < issued.size(); ++i) {
    try {
      tell(issued[i]);
    } catch (const Error& error) {
      throw communicator_.ended_by(error, issued[i].what);
    }
    const std::vector<Awaited> others = awaited_by(issued[i], i);
    awaited.insert(awaited.end(), others.begin(), others.end());
    left[i] = others.size();
    told[i].resize(static_cast<std::size_t>(communicator_.size()));
  }
  Results results(issued.size());
  const auto settle = [&](std::size_t place) {
    results[place] = compare(issued[place], told[place]);
    if (!results[place] && fits) {
      fits(place);
    }
  };
  for (std::size_t i = 0; i < issued.size(); ++i) {
    if (left[i] == 0) {
      settle(i);  // a group of one
    }
  }
  Deadline next_look = Clock::now() + kWaitSlice;
  while (!awaited.empty()) {
    // The first is waited for, the rest looked at: all of them often, where there are several.
    Deadline until = std::min(deadline, Clock::now() + (awaited.size() > 1 ? kShortSlice : kWaitSlice));
    std::vector<Awaited> still;
    for (const Awaited& each : awaited) {
      // What comes now on a channel on which an earlier one has waited in vain is for that one.
      const bool behind = std::any_of(still.begin(), still.end(), [&each](const Awaited& earlier) {
        return earlier.member == each.member && earlier.channel == each.channel;
      });
      auto words = behind ? std::nullopt : hear(each, issued[each.place], until, look);
      until = Clock::now();
      if (!words) {
        still.push_back(each);
        continue;
      }
      told[each.place][static_cast<std::size_t>(each.member)] = std::move(*words);
      if (--left[each.place] == 0) {
        settle(each.place);
      }
    }
    awaited = std::move(still);
    if (Clock::now() >= next_look) {
      look();
      next_look = Clock::now() + kWaitSlice;
    }
    if (!awaited.empty() && Clock::now() >= deadline) {
      std::vector<int> missing;
      for (const Awaited& each : awaited) {
        if (each.place == awaited.front().place) {
          missing.push_back(each.member);
        }
      }
      miss(issued[awaited.front().place], missing);
    }
  }
  return results;
}

void Agreement::tell(const Issued& issued) const {
  Control& control = communicator_.control();
  if (issued.peer >= 0) {
    control.send(job_rank(issued.peer), issued.sends ? senders_ : receivers_, issued.words);
    return;
  }
  const std::string told = numbered(issued);
  for (int member = 0; member < communicator_.size(); ++member) {
    if (member != communicator_.rank()) {
      control.send(job_rank(member), collectives_, told);
    }
  }
}

std::vector<Agreement::Awaited> Agreement::awaited_by(const Issued& issued, std::size_t place) const {
  if (issued.peer >= 0) {
    return {{place, issued.peer, issued.sends ? receivers_ : senders_}};
  }
  std::vector<Awaited> others;
  for (int member = 0; member < communicator_.size(); ++member) {
    if (member != communicator_.rank()) {
      others.push_back({place, member, collectives_});
    }
  }
  return others;
}

std::optional<std::string> Agreement::hear(const Awaited& awaited, const Issued& mine, Deadline until,
                                           const std::function<void()>& look) const {
  try {
    return communicator_.control().try_receive(job_rank(awaited.member), awaited.channel, until);
  } catch (const Error& error) {
    look();  // it may have been told why by now
    throw communicator_.ended_by(error, mine.what);
  }
}

std::optional<Error> Agreement::compare(const Issued& mine, const std::vector<std::string>& told) const {
  if (mine.peer >= 0) {
    return compare_ends(mine, told[static_cast<std::size_t>(mine.peer)]);
  }
  std::vector<std::string> all = told;
  all[static_cast<std::size_t>(communicator_.rank())] = numbered(mine);
  return compare_all(mine, all);
}

std::optional<Error> Agreement::compare_all(const Issued& mine, const std::vector<std::string>& told) const {
  const auto& own = told[static_cast<std::size_t>(communicator_.rank())];
  const auto differs = [](const auto& one, const auto& other) { return words_of(one) != words_of(other); };
  if (std::adjacent_find(told.begin(), told.end(), differs) == told.end()) {
    return std::nullopt;
  }
  const bool one_number =
      std::all_of(told.begin(), told.end(), [&own](const auto& each) { return number_of(each) == number_of(own); });
  std::vector<std::string> words;
  for (const std::string& each : told) {
    words.push_back(one_number ? words_of(each) : str(words_of(each), " as #", number_of(each)));
  }
  const auto other = std::find_if(told.begin(), told.end(), [&](const auto& each) { return differs(each, own); });
  ErrorContext what = mine.what;
  what.peer = job_rank(static_cast<int>(other - told.begin()));
  return Error(ErrorKind::kSchemaMismatch,
               str(title(mine, communicator_), ": the ranks did not issue the same operation: ",
                   who_issued_what(communicator_.ranks(), words), kNothingMoved),
               what);
}

std::optional<Error> Agreement::compare_ends(const Issued& mine, const std::string& theirs) const {
  if (mine.words == theirs) {
    return std::nullopt;
  }
  const int self = job_rank(communicator_.rank());
  const int other = job_rank(mine.peer);
  return Error(
      ErrorKind::kSchemaMismatch,
      str(title(mine, communicator_), ": rank ", mine.sends ? self : other, " sent ", mine.sends ? mine.words : theirs,
          ", rank ", mine.sends ? other : self, " expected ", mine.sends ? theirs : mine.words,
          ". The message was not sent and the communicator can be used again"),
      mine.what);
}

void Agreement::miss(const Issued& mine, const std::vector<int>& members) const {
  std::string who;
  std::string others;
  for (const int member : members) {
    who += str(who.empty() ? "rank " : ", rank ", job_rank(member));
    others += instead(member, mine);
  }
  ErrorContext what = mine.what;
  what.peer = job_rank(members.front());
  throw Error(ErrorKind::kTimedOut,
              str(title(mine, communicator_), mine.peer < 0 ? "" : str(" with rank ", what.peer),
                  " took longer than its time-out: ", who,
                  " did not come in time; is it running, and did it issue the same operation?", others),
              what);
}

std::string Agreement::instead(int member, const Issued& mine) const {
  const auto peek = [&](std::uint64_t channel) -> std::optional<std::string> {
    try {
      return communicator_.control().try_receive(job_rank(member), channel, Clock::now());
    } catch (const Error&) {
      return std::nullopt;
    }
  };
  const std::string start = str(" Rank ", job_rank(member), " waits ");
  if (mine.peer >= 0) {
    if (const auto told = peek(collectives_)) {
      return str(start, "in ", words_of(*told), ".");
    }
  }
  if (mine.peer < 0 || mine.sends) {
    if (const auto told = peek(senders_)) {
      return str(start, "to send ", *told, " to this rank.");
    }
  }
  if (mine.peer < 0 || !mine.sends) {
    if (const auto told = peek(receivers_)) {
      return str(start, "to receive ", *told, " from this rank.");
    }
  }
  return "";
}

}  // namespace hpcomm
