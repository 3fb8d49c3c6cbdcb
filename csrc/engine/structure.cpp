// The cursor over a structure, and the names of its leaves.
#include "engine/structure.h"

#include <cstring>
#include <map>

#include "base/error.h"

namespace hpcomm {

namespace {

[[noreturn]] void reject(const std::string& why) { throw Error(ErrorKind::kProtocol, "message structure " + why); }

// A node that is no tensor: its place, and its bytes without those of nodes below it and their number.
struct Other {
  std::string place;
  std::string_view bytes;
};

// Visits every node; `names` and `others` may be null.
class Walk {
 public:
  Walk(std::string_view structure, std::vector<std::string>* names, std::vector<Other>* others = nullptr)
      : structure_(structure), reader_(structure), names_(names), others_(others) {}

  StructureSummary run() {
    std::string place = "message";
    visit(place, 0);
    if (!reader_.at_end()) {
      reject("has bytes behind its end");
    }
    return summary_;
  }

 private:
  // `place` is that of the node; it is the same again afterwards.
  void visit(std::string& place, int depth) {
    if (depth > kMaxDepth) {
      reject(str("is deeper than ", kMaxDepth, " levels"));
    }
    const std::size_t begin = structure_.size() - reader_.left();
    switch (reader_.node()) {
      case Node::kTensor:
        ++summary_.tensors;
        if (names_ != nullptr) {
          names_->push_back(place);
        }
        return;
      case Node::kNone:
      case Node::kTrue:
      case Node::kFalse:
        return note(place, begin);
      case Node::kInteger:
        (void)reader_.integer();
        return note(place, begin);
      case Node::kReal:
        (void)reader_.real();
        return note(place, begin);
      case Node::kComplex:
        (void)reader_.real();
        (void)reader_.real();
        return note(place, begin);
      case Node::kBigInteger:
      case Node::kText:
        (void)reader_.text();
        return note(place, begin);
      case Node::kNamedTuple:
        (void)reader_.text();
        [[fallthrough]];
      case Node::kList:
      case Node::kTuple: {
        note(place, begin);
        const std::uint32_t count = reader_.count();
        for (std::uint32_t i = 0; i < count; ++i) {
          below(place, names_ == nullptr ? std::string() : str("[", i, "]"), depth);
        }
        return;
      }
      case Node::kDict:
      case Node::kOrderedDict: {
        note(place, begin);
        const std::uint32_t count = reader_.count();
        for (std::uint32_t i = 0; i < count; ++i) {
          const std::string key = dict_key();
          below(place, key, depth);
        }
        return;
      }
      case Node::kDataclass: {
        summary_.has_dataclass = true;
        (void)reader_.text();
        note(place, begin);
        const std::uint32_t count = reader_.count();
        for (std::uint32_t i = 0; i < count; ++i) {
          const std::string_view field = reader_.text();
          below(place, names_ == nullptr ? std::string() : str(".", field), depth);
        }
        return;
      }
    }
    reject("has an unknown kind of node");
  }

  void note(const std::string& place, std::size_t begin) {
    if (others_ != nullptr) {
      others_->push_back({place, structure_.substr(begin, structure_.size() - reader_.left() - begin)});
    }
  }

  void below(std::string& place, const std::string& step, int depth) {
    const std::size_t length = place.size();
    if (names_ != nullptr) {
      place += step;
    }
    visit(place, depth + 1);
    place.resize(length);
  }

  std::string dict_key() {
    switch (reader_.node()) {
      case Node::kText: {
        const std::string_view text = reader_.text();
        return names_ == nullptr ? std::string() : str("['", text, "']");
      }
      case Node::kInteger:
        return number(reader_.integer());
      case Node::kBigInteger:
        return number(reader_.text());
      case Node::kTrue:
        return "[True]";
      case Node::kFalse:
        return "[False]";
      case Node::kTensor:
      case Node::kNone:
      case Node::kReal:
      case Node::kComplex:
      case Node::kList:
      case Node::kTuple:
      case Node::kDict:
      case Node::kOrderedDict:
      case Node::kNamedTuple:
      case Node::kDataclass:
        break;
    }
    reject("has a dict key that is neither text nor a whole number");
  }

  template <typename Number>
  [[nodiscard]] std::string number(const Number& key) const {
    return names_ == nullptr ? std::string() : str("[", key, "]");
  }

  const std::string_view structure_;
  StructureReader reader_;
  std::vector<std::string>* names_;
  std::vector<Other>* others_;
  StructureSummary summary_;
};

}  // namespace

std::string_view StructureReader::take(std::size_t bytes) {
  if (rest_.size() < bytes) {
    reject("is cut short");
  }
  const std::string_view taken = rest_.substr(0, bytes);
  rest_.remove_prefix(bytes);
  return taken;
}

Node StructureReader::node() { return static_cast<Node>(take(1).front()); }

std::uint32_t StructureReader::count() {
  std::uint32_t count = 0;
  std::memcpy(&count, take(sizeof count).data(), sizeof count);
  if (count > rest_.size()) {
    reject("is cut short");
  }
  return count;
}

std::string_view StructureReader::text() { return take(count()); }

std::int64_t StructureReader::integer() {
  std::int64_t number = 0;
  std::memcpy(&number, take(sizeof number).data(), sizeof number);
  return number;
}

double StructureReader::real() {
  double number = 0;
  std::memcpy(&number, take(sizeof number).data(), sizeof number);
  return number;
}

std::vector<std::string> leaf_names(std::string_view structure) {
  std::vector<std::string> names;
  (void)Walk(structure, &names).run();
  return names;
}

std::string difference_around_tensors(std::string_view found, std::string_view expected) {
  std::vector<std::string> names;  // so that places have their names
  std::vector<Other> here;
  std::vector<Other> there;
  (void)Walk(found, &names, &here).run();
  (void)Walk(expected, &names, &there).run();
  std::map<std::string_view, std::string_view> wanted;
  for (const Other& other : there) {
    wanted.emplace(other.place, other.bytes);
  }
  for (const Other& other : here) {
    const auto same = wanted.find(other.place);
    if (same == wanted.end()) {
      return str(other.place, ", where nothing is expected");
    }
    if (same->second != other.bytes) {
      return str(other.place, ": another value or container than expected");
    }
    wanted.erase(same);
  }
  for (const Other& other : there) {
    if (wanted.count(other.place) > 0) {
      return str(other.place, " is missing");
    }
  }
  return "";
}

StructureSummary summary_of(std::string_view structure) { return Walk(structure, nullptr).run(); }

}  // namespace hpcomm
