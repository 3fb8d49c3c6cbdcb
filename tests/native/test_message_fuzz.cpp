// engine/message and engine/structure: whatever bytes come, they are parsed or throw kProtocol; nothing else happens.
//
// HPCOMM_FUZZ_MESSAGES sets the number of damaged headers (by default what fits into a second), HPCOMM_FUZZ_SECONDS
// ends earlier, HPCOMM_FUZZ_SEED gives other ones.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/message.h"
#include "engine/parcel.h"
#include "engine/structure.h"
#include "native/check.h"
#include "native/message_bytes.h"
#include "stream/event.h"

using namespace hpcomm;
using namespace hpcomm::testing;

namespace {

using Random = std::mt19937_64;

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atol(text) : otherwise;
}

long cases() { return setting("HPCOMM_FUZZ_MESSAGES", 200000); }
std::uint64_t seed() { return static_cast<std::uint64_t>(setting("HPCOMM_FUZZ_SEED", 31)); }

// Counts cases until there are enough, or the time is up.
class Rounds {
 public:
  explicit Rounds(long wanted)
      : wanted_(wanted), end_(Clock::now() + std::chrono::seconds(setting("HPCOMM_FUZZ_SECONDS", 3600))) {}
  bool next() {
    if (done_ == wanted_ || (done_ % 1024 == 0 && Clock::now() >= end_)) {
      return false;
    }
    ++done_;
    return true;
  }
  [[nodiscard]] long done() const { return done_; }

 private:
  long wanted_;
  Deadline end_;
  long done_ = 0;
};

MessageHeader some_header(Random& random) {
  MessageHeader header{random(), random(), static_cast<std::int32_t>(random()), random(), random(), 0, std::nullopt};
  header.schema_bytes = random() % 2 == 0 ? 0 : static_cast<std::uint32_t>(random() % kMaxSchemaBytes);
  if (random() % 2 == 0) {
    header.lent = MessageHeader::Lent{static_cast<std::uint32_t>(random()), random()};
  }
  header.frozen = random() % 2 == 0;
  return header;
}

template <typename Parse>
bool accepted(const std::string& bytes, const Parse& parse) {
  const std::vector<char> copy = exact(bytes);
  try {
    parse(std::string_view(copy.data(), copy.size()));
    return true;
  } catch (const Error& error) {
    CHECK_EQ(error.kind(), ErrorKind::kProtocol);
    return false;
  }
}

void put_count(std::string& bytes, std::uint32_t count) {
  bytes.append(reinterpret_cast<const char*>(&count), sizeof count);
}

void put_text(std::string& bytes, const std::string& text) {
  put_count(bytes, static_cast<std::uint32_t>(text.size()));
  bytes += text;
}

// A structure as csrc/torch/tree.cpp writes them; returns its number of tensors.
std::size_t put_structure(Random& random, std::string& bytes, int depth) {
  const std::uint64_t kind = random() % (depth > 4 ? 6 : 11);
  const auto children = [&](std::uint32_t count, const auto& before) {
    std::size_t tensors = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      before();
      tensors += put_structure(random, bytes, depth + 1);
    }
    return tensors;
  };
  const auto count = static_cast<std::uint32_t>(random() % 4);
  constexpr char kPlain[] = {'T', 'N', '1', '0'};
  switch (kind) {
    case 0:
    case 1:
    case 2:
    case 3:
      bytes.push_back(kPlain[kind]);
      return kind == 0 ? 1 : 0;
    case 4:
      bytes.push_back(random() % 2 == 0 ? 'I' : 'F');
      bytes.append(8, static_cast<char>(random()));
      return 0;
    case 5:
      bytes.push_back('S');
      put_text(bytes, "text");
      return 0;
    case 6:
    case 7:
      bytes.push_back(kind == 6 ? 'l' : 'u');
      put_count(bytes, count);
      return children(count, [] {});
    case 8:
      bytes.push_back(random() % 2 == 0 ? 'm' : 'o');
      put_count(bytes, count);
      return children(count, [&] {
        bytes.push_back('S');
        put_text(bytes, "key");
      });
    case 9:
      bytes.push_back('n');
      put_text(bytes, "module:Name");
      put_count(bytes, count);
      return children(count, [] {});
    default:
      bytes.push_back('D');
      put_text(bytes, "module:Name");
      put_count(bytes, count);
      return children(count, [&] { put_text(bytes, "field"); });
  }
}

Schema some_schema(Random& random) {
  Schema schema;
  put_structure(random, schema.structure, 0);
  schema.direct_from = random() >> random() % 64;
  for (std::uint64_t i = random() % 5; i > 0; --i) {
    TensorSchema tensor;
    tensor.dtype = static_cast<DType>(random() % 21);
    if (is_floating(tensor.dtype) && tensor.dtype != DType::kBFloat16 && random() % 2 == 0) {
      tensor.cast = DType::kBFloat16;
    }
    tensor.requires_grad = random() % 2 == 0;
    for (std::uint64_t d = random() % 4; d > 0; --d) {
      tensor.shape.push_back(static_cast<std::int64_t>(random() % 9));
    }
    if (random() % 2 == 0) {
      put_some_order(random, tensor);
    }
    schema.tensors.push_back(std::move(tensor));
  }
  return schema;
}

}  // namespace

TEST(fuzz_message_headers) {
  Random random(seed());
  Rounds rounds(cases());
  long taken = 0;
  while (rounds.next()) {
    std::string bytes = encode_header(some_header(random));
    damage(random, bytes);
    if (bytes.size() >= kHeaderBytes && random() % 2 == 0) {
      bytes = with_crc(std::move(bytes));  // past the checksum, to what is behind it
    }
    taken += accepted(bytes, [&bytes](std::string_view copy) {
      CHECK(encode_header(parse_header(copy)) == bytes.substr(0, kHeaderBytes));
    });
  }
  if (setting("HPCOMM_FUZZ_MESSAGES", 0) > 0) {
    std::printf("%ld damaged headers, %ld of them repaired and accepted\n", rounds.done(), taken);
  }
  CHECK(taken > rounds.done() / 100);
}

TEST(fuzz_message_schemas) {
  Random random(seed() + 1);
  Rounds rounds(cases() / 10);
  long taken = 0;
  while (rounds.next()) {
    std::string bytes = encode_schema(some_schema(random));
    damage(random, bytes);
    taken += accepted(bytes, [&bytes](std::string_view copy) {
      const KnownPtr known = KnownSchema::read(copy, 0);
      CHECK(encode_schema(known->schema) == bytes);
      // Whatever was accepted has places that lie in the buffers that its parcel asks for.
      for (std::size_t i = 0; i < known->schema.tensors.size(); ++i) {
        const Parcel::Place& place = known->parcel.places[i];
        const TensorSchema& tensor = known->schema.tensors[i];
        const std::size_t end = place.offset + tensor.count() * size_of(tensor.dtype);
        CHECK(place.area != Parcel::Area::kPacked || end <= known->parcel.packed.bytes());
        CHECK(place.area != Parcel::Area::kDirect || end <= known->parcel.direct_bytes);
        CHECK(place.area != Parcel::Area::kCast || end <= known->parcel.cast_bytes);
        CHECK((place.area == Parcel::Area::kNowhere) == (tensor.count() == 0));
      }
      (void)difference(known->schema, Schema{}, Compare::kEverything);
      (void)difference(Schema{}, known->schema, Compare::kKinds);
    });
  }
  CHECK(taken > rounds.done() / 100);
}

TEST(fuzz_message_structures) {
  Random random(seed() + 2);
  Rounds rounds(cases() / 10);
  long taken = 0;
  while (rounds.next()) {
    std::string bytes;
    const std::size_t tensors = put_structure(random, bytes, 0);
    CHECK_EQ(summary_of(bytes).tensors, tensors);
    CHECK_EQ(leaf_names(bytes).size(), tensors);
    const std::string whole = bytes;
    CHECK_EQ(difference_in_structure(whole, whole, true), "");
    damage(random, bytes);
    taken += accepted(bytes, [&whole](std::string_view copy) {
      CHECK_EQ(leaf_names(copy).size(), summary_of(copy).tensors);
      CHECK(!difference_in_structure(copy, whole, true).empty() || difference_in_structure(copy, whole, false).empty());
    });
  }
  CHECK(taken > rounds.done() / 100);
}
