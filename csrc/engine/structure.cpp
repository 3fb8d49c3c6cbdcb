// The cursor over a structure, and the names of its leaves.
#include "engine/structure.h"

#include <cstring>
#include <map>

#include "base/error.h"

namespace hpcomm {

namespace {

[[noreturn]] void reject_structure(const std::string& why) {
  throw Error(ErrorKind::kProtocol, "message structure " + why);
}

// A node: its place, and its bytes without those of nodes below it and their number.
struct Visited {
  std::string place;
  std::string_view bytes;

  [[nodiscard]] Node node() const noexcept { return static_cast<Node>(bytes.front()); }
};

// What Python calls a node, as far as it has one word for it: a whole number is an int, however long it is.
std::string kind_of(const Visited& visited) {
  switch (visited.node()) {
    case Node::kTensor:
      return "a tensor";
    case Node::kNone:
      return "None";
    case Node::kTrue:
    case Node::kFalse:
      return "a bool";
    case Node::kInteger:
    case Node::kBigInteger:
      return "an int";
    case Node::kReal:
      return "a float";
    case Node::kComplex:
      return "a complex";
    case Node::kText:
      return "a str";
    case Node::kList:
      return "a list";
    case Node::kTuple:
      return "a tuple";
    case Node::kDict:
      return "a dict";
    case Node::kOrderedDict:
      return "an OrderedDict";
    case Node::kNamedTuple:
    case Node::kDataclass:
      return str("a ", visited.bytes.substr(1 + sizeof(std::uint32_t)));  // the name of its class
  }
  return "damaged";  // the walk has found all kinds known
}

// Visits every node; `names` and `visited` may be null, the second where the first is.
class Walk {
 public:
  Walk(std::string_view structure, std::vector<std::string>* names, std::vector<Visited>* visited = nullptr)
      : structure_(structure), reader_(structure), names_(names), visited_(visited) {}

  StructureSummary run() {
    std::string place = "message";
    visit(place, 0);
    if (!reader_.at_end()) {
      reject_structure("has bytes behind its end");
    }
    return summary_;
  }

 private:
  // `place` is that of the node; it is the same again afterwards.
  void visit(std::string& place, int depth) {
    if (depth > kMaxDepth) {
      reject_structure(str("is deeper than ", kMaxDepth, " levels"));
    }
    const std::size_t begin = structure_.size() - reader_.left();
    switch (reader_.node()) {
      case Node::kTensor:
        ++summary_.tensors;
        if (names_ != nullptr) {
          names_->push_back(place);
        }
        return note(place, begin);
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
    reject_structure("has an unknown kind of node");
  }

  void note(const std::string& place, std::size_t begin) {
    if (visited_ != nullptr) {
      visited_->push_back({place, structure_.substr(begin, structure_.size() - reader_.left() - begin)});
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
        return names_ == nullptr ? std::string() : quoted(text);
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
    reject_structure("has a dict key that is neither text nor a whole number");
  }

  // No text of one key looks like the step of another, or like two.
  static std::string quoted(std::string_view text) {
    std::string step = "['";
    for (const char byte : text) {
      if (byte == '\'' || byte == '\\') {
        step += '\\';
      }
      step += byte;
    }
    return step + "']";
  }

  template <typename Number>
  [[nodiscard]] std::string number(const Number& key) const {
    return names_ == nullptr ? std::string() : str("[", key, "]");
  }

  const std::string_view structure_;
  StructureReader reader_;
  std::vector<std::string>* names_;
  std::vector<Visited>* visited_;
  StructureSummary summary_;
};

}  // namespace

std::string_view StructureReader::take(std::size_t bytes) {
  if (rest_.size() < bytes) {
    reject_structure("is cut short");
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
    reject_structure("is cut short");
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

std::string difference_in_structure(std::string_view found, std::string_view expected, bool values) {
  std::vector<std::string> names;  // so that places have their names
  std::vector<Visited> here;
  std::vector<Visited> there;
  (void)Walk(found, &names, &here).run();
  (void)Walk(expected, &names, &there).run();
  std::multimap<std::string_view, const Visited*> wanted;  // a damaged dict may have a key twice
  for (const Visited& one : there) {
    wanted.emplace(one.place, &one);
  }
  for (const Visited& one : here) {
    const auto same = wanted.lower_bound(one.place);
    if (same == wanted.end() || same->first != one.place) {
      return str(one.place, ", where nothing is expected");
    }
    if (const std::string is = kind_of(one), should = kind_of(*same->second); is != should) {
      return str(one.place, " is ", is, " where ", should, " is expected");
    }
    if (values && same->second->bytes != one.bytes) {
      return str(one.place, ": another value than expected");
    }
    wanted.erase(same);
  }
  for (const Visited& one : there) {
    if (wanted.count(one.place) > 0) {
      return str(one.place, " is missing");
    }
  }
  for (std::size_t i = 0; i < here.size(); ++i) {  // as many as there
    if (here[i].place != there[i].place) {
      return str(here[i].place, " where ", there[i].place, " is expected: the order of the entries differs");
    }
  }
  return "";
}

StructureSummary summary_of(std::string_view structure) { return Walk(structure, nullptr).run(); }

}  // namespace hpcomm
