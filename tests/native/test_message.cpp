// engine/message: headers and schemas there and back, and against damaged bytes.
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/message.h"
#include "engine/parcel.h"
#include "native/check.h"
#include "native/message_bytes.h"

using namespace hpcomm;
using namespace hpcomm::testing;

namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

Schema random_schema(std::mt19937_64& random) {
  Schema schema;
  schema.structure = std::string(random() % 20, 's');
  for (std::size_t i = random() % 6; i > 0; --i) {
    TensorSchema tensor;
    tensor.dtype = static_cast<DType>(random() % 21);
    tensor.requires_grad = random() % 2 == 0;
    for (std::size_t d = random() % 4; d > 0; --d) {
      tensor.shape.push_back(random() % 10);
    }
    if (random() % 2 == 0) {
      put_some_order(random, tensor);
    }
    schema.tensors.push_back(tensor);
  }
  return schema;
}

std::string with_shapes(const std::vector<std::vector<std::int64_t>>& shapes) {
  Schema schema;
  for (const auto& shape : shapes) {
    schema.tensors.push_back({DType::kUInt8, false, shape});
  }
  return encode_schema(schema);
}

}  // namespace

TEST(message_headers_come_back) {
  for (const MessageHeader& header :
       {MessageHeader{}, MessageHeader{1, 2, 3, 4, 5, 6, MessageHeader::Lent{7, 8}},
        MessageHeader{~0ULL, ~0ULL, -1, ~0ULL, ~0ULL, kMaxSchemaBytes, MessageHeader::Lent{~0U, ~0ULL}},
        MessageHeader{1, 2, 3, 4, 5, 6, std::nullopt, true},
        MessageHeader{1, 2, 3, 4, 5, 6, MessageHeader::Lent{7, 8}, true},
        MessageHeader{0, 0, std::numeric_limits<std::int32_t>::min(), 0, 0, 0, std::nullopt}}) {
    const std::string bytes = encode_header(header);
    CHECK_EQ(bytes.size(), kHeaderBytes);
    CHECK(parse_header(bytes) == header);
    CHECK(parse_header(bytes + "schema") == header);
    CHECK(with_crc(bytes) == bytes);
  }
}

TEST(message_header_cut_anywhere_is_refused) {
  const std::string bytes = encode_header({1, 2, 3, 4, 5, 6, std::nullopt});
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    const auto cut = exact(bytes.substr(0, length));
    CHECK_THROWS(ErrorKind::kProtocol, parse_header({cut.data(), cut.size()}), "instead of 64");
  }
}

TEST(message_header_with_any_flipped_bit_is_refused) {
  const std::string good = encode_header({1, 2, 3, 4, 5, 6, std::nullopt});
  for (std::size_t bit = 0; bit < 8 * kHeaderBytes; ++bit) {
    std::string bytes = good;
    bytes[bit / 8] ^= static_cast<char>(1U << bit % 8);
    CHECK_THROWS(ErrorKind::kProtocol, parse_header(bytes), "header is damaged");
  }
}

TEST(message_header_that_no_version_writes_is_refused) {
  const std::string good = encode_header({1, 2, 3, 4, 5, 6, std::nullopt});
  const auto with = [&good](std::size_t at, char value) {
    std::string bytes = good;
    bytes[at] = value;
    return with_crc(bytes);
  };
  CHECK_THROWS(ErrorKind::kProtocol, parse_header(with(0, 'X')), "damaged");
  CHECK_THROWS(ErrorKind::kProtocol, parse_header(with(4, 1)), "version 1");
  CHECK_THROWS(ErrorKind::kProtocol, parse_header(with(6, 4)), "header");
  for (std::size_t place = 40; place < 52; ++place) {
    CHECK_THROWS(ErrorKind::kProtocol, parse_header(with(place, 1)), "memory that is not lent");
  }
  CHECK_THROWS(ErrorKind::kProtocol, parse_header(with(55, 1)), "announces a schema of");
}

TEST(message_header_parser_withstands_mutations) {
  std::mt19937_64 random(21);
  int accepted = 0;
  for (int round = 0; round < 150000; ++round) {
    MessageHeader header{random(), random(), static_cast<std::int32_t>(random()), random(), random(), 0, std::nullopt};
    header.schema_bytes = static_cast<std::uint32_t>(random() % kMaxSchemaBytes);
    if (random() % 2 == 0) {
      header.lent = MessageHeader::Lent{static_cast<std::uint32_t>(random()), random()};
    }
    header.frozen = random() % 2 == 0;
    std::string bytes = encode_header(header);
    damage(random, bytes);
    if (round % 2 == 0 && bytes.size() >= kHeaderBytes) {
      bytes = with_crc(bytes);  // past the checksum, to what is behind it
    }
    const auto copy = exact(bytes);
    try {
      const MessageHeader parsed = parse_header({copy.data(), copy.size()});
      ++accepted;
      CHECK(encode_header(parsed) == bytes.substr(0, kHeaderBytes));
    } catch (const Error& error) {
      CHECK_EQ(error.kind(), ErrorKind::kProtocol);
    }
  }
  CHECK(accepted > 1000);
}

TEST(message_schemas_come_back) {
  std::mt19937_64 random(22);
  for (int round = 0; round < 2000; ++round) {
    const Schema schema = random_schema(random);
    const std::string bytes = encode_schema(schema);
    CHECK(parse_schema(bytes) == schema);
    CHECK_EQ(parse_schema(bytes).fingerprint(), schema.fingerprint());
  }
  Schema large;
  large.structure = std::string(100000, '\0');
  large.tensors.resize(5000, {DType::kBFloat16, true, std::vector<std::int64_t>(64, 1)});
  CHECK(parse_schema(encode_schema(large)) == large);
}

TEST(message_schema_counts_and_prints) {
  const Schema schema{
      "tree", {{DType::kFloat32, true, {8, 512}}, {DType::kBFloat16, false, {}}, {DType::kInt64, false, {3, 0}}}};
  CHECK_EQ(schema.to_text(), "float32[8, 512] bfloat16[] int64[3, 0]");
  CHECK_EQ(Schema().to_text(), "no tensors");
  CHECK_EQ(schema.tensors[0].count(), 4096);
  CHECK_EQ(schema.tensors[1].count(), 1);
  CHECK_EQ(schema.tensors[2].count(), 0);
  const Parcel parcel(schema);
  CHECK_EQ(parcel.bytes(), 16384 + 64);
  CHECK_EQ(parcel.packed.entries()[1].offset, 16384);
}

TEST(parcel_packs_what_is_below_the_limit) {
  using Area = Parcel::Area;
  const auto areas = [](std::vector<TensorSchema> tensors, std::uint64_t direct_from) {
    // What the receiver works out from the bytes is what the sender had.
    const Schema sent{"t", std::move(tensors), direct_from};
    const Parcel here(sent);
    const Parcel there(parse_schema(encode_schema(sent)));
    std::vector<Area> all;
    for (std::size_t i = 0; i < here.places.size(); ++i) {
      CHECK(here.places[i].area == there.places[i].area);
      CHECK_EQ(here.places[i].offset, there.places[i].offset);
      all.push_back(here.places[i].area);
    }
    CHECK_EQ(here.bytes(), there.bytes());
    return all;
  };
  const auto bytes = [](std::int64_t count) { return TensorSchema{DType::kUInt8, false, {count}}; };
  const auto cast = [](std::int64_t count) { return TensorSchema{DType::kFloat32, false, {count}, DType::kBFloat16}; };
  CHECK(areas({bytes(99), bytes(100), bytes(101), bytes(0)}, 100) ==
        (std::vector<Area>{Area::kPacked, Area::kDirect, Area::kDirect, Area::kNowhere}));
  CHECK(areas({bytes(99)}, 100) == std::vector<Area>{Area::kDirect});  // nothing to pack it with
  CHECK(areas({bytes(0), bytes(99)}, 100) == (std::vector<Area>{Area::kNowhere, Area::kDirect}));
  CHECK(areas({bytes(1), bytes(2)}, 0) == (std::vector<Area>{Area::kDirect, Area::kDirect}));
  CHECK(areas({cast(1000)}, 100) == std::vector<Area>{Area::kCast});  // the cast is the copy
  CHECK(areas({cast(1000), bytes(1000)}, 100) == (std::vector<Area>{Area::kCast, Area::kDirect}));
  // By the size that it has, whatever its dtype.
  CHECK(areas({{DType::kFloat64, false, {12}}, {DType::kFloat64, false, {13}}}, 100) ==
        (std::vector<Area>{Area::kPacked, Area::kDirect}));
}

TEST(message_schema_fingerprints_differ) {
  const Schema base{"t", {{DType::kFloat32, false, {2, 3}}}};
  std::vector<Schema> others(6, base);
  others[0].structure = "u";
  others[1].tensors[0].dtype = DType::kInt32;
  others[2].tensors[0].requires_grad = true;
  others[3].tensors[0].shape = {3, 2};
  others[4].tensors[0].shape = {6};
  others[5].tensors.push_back({DType::kFloat32, false, {}});
  for (const Schema& other : others) {
    CHECK(other.fingerprint() != base.fingerprint());
  }
}

TEST(message_schema_cut_anywhere_is_refused) {
  const std::string bytes = encode_schema({"tree", {{DType::kFloat32, true, {8, 512}}, {DType::kBool, false, {}}}});
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    const auto cut = exact(bytes.substr(0, length));
    CHECK_THROWS(ErrorKind::kProtocol, parse_schema({cut.data(), cut.size()}), "cut short");
  }
  CHECK_THROWS(ErrorKind::kProtocol, parse_schema(bytes + "x"), "bytes behind its end");
}

TEST(message_schema_limits) {
  CHECK_THROWS(ErrorKind::kProtocol, parse_schema(with_shapes({{-1}})), "dimension of -1");
  // Products that wrap around, also behind or before a zero.
  CHECK_THROWS(ErrorKind::kProtocol, parse_schema(with_shapes({{kHuge, 2}})), "larger than memory");
  CHECK_THROWS(ErrorKind::kProtocol, parse_schema(with_shapes({{1LL << 32, 1LL << 32}})), "larger than memory");
  CHECK_THROWS(ErrorKind::kProtocol, parse_schema(with_shapes({{0, 1LL << 32, 1LL << 32}})), "larger than memory");
  CHECK_THROWS(ErrorKind::kProtocol, parse_schema(with_shapes({{1LL << 32, 1LL << 32, 0}})), "larger than memory");
  CHECK_THROWS(ErrorKind::kProtocol, parse_schema(with_shapes({{kHuge}, {1}})), "larger than memory");
  CHECK_EQ(parse_schema(with_shapes({{kHuge, 0}})).tensors[0].count(), 0);
  CHECK_EQ(parse_schema(with_shapes({{kHuge}})).tensors[0].count(), static_cast<std::uint64_t>(kHuge));
  // Even the largest that is accepted has a layout that does not wrap around.
  CHECK(Parcel(parse_schema(with_shapes({{kHuge - 1}, {1}}))).bytes() > static_cast<std::uint64_t>(kHuge));
  CHECK_EQ(parse_schema(with_shapes({std::vector<std::int64_t>(64, 1)})).tensors[0].shape.size(), 64);
  CHECK_THROWS(ErrorKind::kInvalidArgument, with_shapes({std::vector<std::int64_t>(65, 1)}), "65 dimensions");

  std::string bytes = with_shapes({{1}});
  bytes[16] = 21;  // dtype
  CHECK_THROWS(ErrorKind::kProtocol, parse_schema(bytes), "unknown dtype");
  for (const DType wire : {DType::kInt8, DType::kFloat32}) {  // of a uint8
    bytes = with_shapes({{1}});
    bytes[17] = static_cast<char>(wire);
    CHECK_THROWS(ErrorKind::kProtocol, parse_schema(bytes), "a cast that there is not");
  }
  bytes = with_shapes({{1}});
  bytes[18] = 4;
  CHECK_THROWS(ErrorKind::kProtocol, parse_schema(bytes), "unknown flags");
  bytes = with_shapes({{1}});
  bytes[19] = 65;
  CHECK_THROWS(ErrorKind::kProtocol, parse_schema(bytes), "65 dimensions");
}

TEST(message_schema_says_how_a_tensor_lies_in_memory) {
  const TensorSchema own{DType::kFloat32, false, {2, 3, 4}};
  CHECK((own.strides() == std::vector<std::int64_t>{12, 4, 1}));
  TensorSchema last_first = own;
  last_first.order = {2, 0, 1};
  CHECK((last_first.strides() == std::vector<std::int64_t>{3, 1, 6}));
  const Schema one{"T", {own}};
  const Schema other{"T", {last_first}};
  CHECK(difference(other, one, Compare::kEverything).find("another order") != std::string::npos);
  CHECK_EQ(difference(other, one, Compare::kKinds), "");
  CHECK(same_but_shapes(one, other));
  const std::string bytes = encode_schema(other);
  for (const std::string& wrong : {std::string("\0\1\2", 3), std::string("\0\0\1", 3), std::string("\0\1\3", 3)}) {
    const std::string damaged = bytes.substr(0, bytes.size() - 3) + wrong;
    CHECK_THROWS(ErrorKind::kProtocol, parse_schema(damaged), "order of dimensions");
  }
}

TEST(message_schema_announcing_more_than_it_has_allocates_nothing) {
  // 4 Gi tensors, or a structure of 4 GiB: the count is believed only as far as bytes follow.
  for (std::size_t at : {0U, 12U}) {
    std::string bytes = encode_schema({});
    std::memset(bytes.data() + at, 0xff, 4);
    CHECK_THROWS(ErrorKind::kProtocol, parse_schema(bytes), "cut short");
  }
}

TEST(message_schema_parser_withstands_mutations) {
  std::mt19937_64 random(23);
  int accepted = 0;
  for (int round = 0; round < 150000; ++round) {
    std::string bytes = encode_schema(random_schema(random));
    damage(random, bytes);
    const auto copy = exact(bytes);
    try {
      const Schema parsed = parse_schema({copy.data(), copy.size()});
      ++accepted;
      CHECK(encode_schema(parsed) == bytes);
      (void)Parcel(parsed);
    } catch (const Error& error) {
      CHECK_EQ(error.kind(), ErrorKind::kProtocol);
    }
  }
  CHECK(accepted > 1000);
}
