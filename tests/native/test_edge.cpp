// engine/edge: messages between ranks that are threads, headers over real Controls.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/solo/solo_communicator.h"
#include "engine/edge.h"
#include "native/check.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

using Tensors = std::vector<std::vector<unsigned char>>;

// What one side sends and the other can work out for itself.
struct Packet {
  Schema schema;
  std::shared_ptr<Tensors> tensors = std::make_shared<Tensors>();

  [[nodiscard]] std::vector<Source> pointers() const {
    std::vector<Source> all;
    for (const auto& tensor : *tensors) {
      all.emplace_back(tensor.empty() ? nullptr : static_cast<const void*>(tensor.data()));
    }
    return all;
  }
};

Packet fill(Schema schema, unsigned seed) {
  std::mt19937 random(seed);
  Packet packet{std::move(schema)};
  for (const TensorSchema& tensor : packet.schema.tensors) {
    std::vector<unsigned char> bytes(tensor.count() * size_of(tensor.dtype));
    for (unsigned char& byte : bytes) {
      byte = static_cast<unsigned char>(random());
    }
    packet.tensors->push_back(std::move(bytes));
  }
  return packet;
}

// A random tree, one of some dozens of shapes so that receivers meet old ones again.
Packet random_packet(unsigned seed, unsigned shapes = 40) {
  std::mt19937 random(seed % shapes);
  Schema schema;
  schema.structure = str("tree ", seed % shapes);
  for (std::size_t i = random() % 9; i > 0; --i) {
    TensorSchema tensor;
    tensor.dtype = static_cast<DType>(random() % 21);
    tensor.requires_grad = random() % 2 == 0;
    for (std::size_t d = random() % 4; d > 0; --d) {
      tensor.shape.push_back(random() % 8);  // empty ones too
    }
    schema.tensors.push_back(std::move(tensor));
  }
  return fill(std::move(schema), seed);
}

Packet floats(std::vector<std::int64_t> shape, unsigned seed = 1) {
  return fill({"x", {{DType::kFloat32, false, std::move(shape)}}}, seed);
}

WorkPtr send(SendEdge& edge, const Packet& packet, int microbatch = -1) {
  return edge.send(packet.schema, packet.pointers(), packet.tensors, microbatch);
}

void check_arrived(const Receipt& receipt, const Packet& packet) {
  const auto error = error_of(*receipt.work);
  if (error) {
    check::fail(__FILE__, __LINE__, str("receipt: ", error->what()));
    return;
  }
  const Incoming& message = *receipt.message;
  CHECK(message.schema() == packet.schema);
  for (std::size_t i = 0; i < packet.tensors->size(); ++i) {
    const auto& want = (*packet.tensors)[i];
    const void* got = message.data(i);
    CHECK(want.empty() || std::memcmp(got, want.data(), want.size()) == 0);
  }
}

void check_error(const Work& work, ErrorKind kind, const std::string& part) {
  const auto error = error_of(work);
  CHECK(error.has_value());
  if (error && (error->kind() != kind || std::string(error->what()).find(part) == std::string::npos)) {
    check::fail(__FILE__, __LINE__,
                str(to_string(error->kind()), ", not ", to_string(kind), " with \"", part, "\": ", error->what()));
  }
}

std::shared_ptr<Allocator> heap() { return std::make_shared<HeapAllocator>(); }

// Body(world, own edge) on ranks 0 (sender) and 1 (receiver).
template <typename Sender, typename Receiver>
void run_pair(SchemaMode mode, const Sender& sender, const Receiver& receiver, milliseconds timeout = 20s) {
  ThreadJob(2, 3, timeout).run([&](const std::shared_ptr<Communicator>& world) {
    if (world->rank() == 0) {
      SendEdge edge({world, 1, mode}, heap());
      sender(*world, edge);
    } else {
      RecvEdge edge({world, 0, mode}, heap());
      receiver(*world, edge);
    }
  });
}

}  // namespace

// --- Messages --------------------------------------------------------------------------------------------------------

TEST(edge_carries_every_dtype_and_shape) {
  Schema schema{"everything", {}};
  for (int code = 0; code < 21; ++code) {
    const auto dtype = static_cast<DType>(code);
    schema.tensors.push_back({dtype, code % 2 == 0, {code + 1, 3}});
    schema.tensors.push_back({dtype, false, {}});
    schema.tensors.push_back({dtype, true, {0, 5}});
  }
  const Packet packet = fill(schema, 4);
  run_pair(
      SchemaMode::kPerMessage, [&](Communicator&, SendEdge& edge) { CHECK(!error_of(*send(edge, packet, 6))); },
      [&](Communicator&, RecvEdge& edge) { check_arrived(edge.recv(6), packet); });
}

TEST(edge_carries_messages_without_tensors) {
  const Packet nothing = fill({"None", {}}, 1);
  const Packet empty = fill({"x", {{DType::kFloat32, false, {0}}}}, 1);
  run_pair(
      SchemaMode::kPerMessage,
      [&](Communicator&, SendEdge& edge) {
        for (const Packet* packet : {&nothing, &empty, &nothing}) {
          const WorkPtr work = send(edge, *packet);
          CHECK(work->done());  // nothing but the header travels
          CHECK(!error_of(*work));
        }
      },
      [&](Communicator&, RecvEdge& edge) {
        for (const Packet* packet : {&nothing, &empty, &nothing}) {
          check_arrived(edge.recv(-1), *packet);
        }
      });
}

TEST(edge_sends_a_single_tensor_without_packing) {
  // Of a length that is no multiple of a cache line, so that padding is neither read nor written.
  const Packet packet = floats({17});
  const auto allocator = std::make_shared<HeapAllocator>();
  ThreadJob(2).run([&](const std::shared_ptr<Communicator>& world) {
    if (world->rank() == 0) {
      SendEdge edge({world, 1}, allocator);
      CHECK(!error_of(*send(edge, packet)));
    } else {
      RecvEdge edge({world, 0}, heap());
      const Receipt receipt = edge.recv(-1);
      check_arrived(receipt, packet);
      const auto* data = static_cast<const unsigned char*>(receipt.message->data(0));
      CHECK_EQ(data[17 * 4], 0xee);
    }
  });
  CHECK_EQ(allocator->allocations.load(), 0);
}

TEST(edge_takes_a_thousand_random_trees_in_both_directions) {
  const ThreadJob job(2, 11);
  run_ranks(2, [&](int rank) {
    const int peer = 1 - rank;
    // A lane per direction, as the pipeline has: on one lane with nothing buffered, two sends would wait for each
    // other.
    const auto out = job.communicator(rank, rank == 0 ? "forward" : "backward");
    const auto in = job.communicator(rank, rank == 0 ? "backward" : "forward");
    SendEdge sender({out, peer}, heap());
    RecvEdge receiver({in, peer}, heap());
    std::vector<WorkPtr> works;
    std::vector<Receipt> receipts;
    for (unsigned i = 0; i < 500; ++i) {
      works.push_back(send(sender, random_packet(i * 2 + static_cast<unsigned>(rank)), static_cast<int>(i)));
      receipts.push_back(receiver.recv(static_cast<int>(i)));
    }
    for (unsigned i = 0; i < 500; ++i) {
      CHECK(!error_of(*works[i]));
      check_arrived(receipts[i], random_packet(i * 2 + static_cast<unsigned>(peer)));
      receipts[i].message.reset();
    }
  });
}

TEST(edge_several_on_one_communicator_keep_apart) {
  ThreadJob(2, 12).run([](const std::shared_ptr<Communicator>& world) {
    const auto seed = [](std::size_t edge, unsigned i) { return static_cast<unsigned>(edge) * 1000 + i; };
    if (world->rank() == 0) {
      std::vector<std::unique_ptr<SendEdge>> edges;
      for (int e = 0; e < 3; ++e) {
        edges.push_back(std::make_unique<SendEdge>(EdgeConfig{world, 1}, heap()));
      }
      std::vector<WorkPtr> works;
      for (unsigned i = 0; i < 20; ++i) {
        for (std::size_t e = 0; e < 3; ++e) {
          works.push_back(send(*edges[e], random_packet(seed(e, i))));
        }
      }
      for (const WorkPtr& work : works) {
        CHECK(!error_of(*work));
      }
    } else {
      std::vector<std::unique_ptr<RecvEdge>> edges;
      for (int e = 0; e < 3; ++e) {
        edges.push_back(std::make_unique<RecvEdge>(EdgeConfig{world, 0}, heap()));
      }
      for (unsigned i = 0; i < 20; ++i) {
        for (std::size_t e = 0; e < 3; ++e) {
          check_arrived(edges[e]->recv(-1), random_packet(seed(e, i)));
        }
      }
    }
  });
}

TEST(edge_work_names_what_it_does) {
  run_pair(
      SchemaMode::kPerMessage,
      [](Communicator&, SendEdge& edge) {
        for (int i = 0; i < 3; ++i) {
          const WorkPtr work = send(edge, floats({3}));
          CHECK_EQ(work->what().operation, "send");
          CHECK_EQ(work->what().sequence, i);
          CHECK_EQ(work->what().peer, 1);
          work->wait();
        }
      },
      [](Communicator&, RecvEdge& edge) {
        for (int i = 0; i < 3; ++i) {
          const Receipt receipt = edge.recv(-1);
          CHECK_EQ(receipt.work->what().operation, "recv");
          CHECK_EQ(receipt.work->what().sequence, i);
          CHECK_EQ(receipt.work->what().peer, 0);
          receipt.work->wait();
        }
      });
}

TEST(edge_close_finishes_receipts_that_were_asked_for) {
  run_pair(
      SchemaMode::kPerMessage,
      [](Communicator& world, SendEdge& edge) {
        (void)world.control().receive(1, 1, Clock::now() + 20s);
        CHECK(!error_of(*send(edge, floats({64}))));
      },
      [](Communicator& world, RecvEdge& edge) {
        const Receipt receipt = edge.recv(-1);
        std::thread closing([&world] { world.close(); });
        std::this_thread::sleep_for(5ms);  // the message comes while close() waits
        world.control().send(0, 1, "now");
        check_arrived(receipt, floats({64}));
        closing.join();
      });
}

// --- Schemas ---------------------------------------------------------------------------------------------------------

TEST(edge_frozen_schema_needs_no_headers) {
  run_pair(
      SchemaMode::kFrozen,
      [](Communicator&, SendEdge& edge) {
        for (unsigned i = 0; i < 20; ++i) {
          send(edge, floats({5, 5}, i), static_cast<int>(i))->wait();
        }
        // What does not fit is refused before anything is issued: the next good one still arrives.
        CHECK_THROWS(ErrorKind::kSchemaMismatch, send(edge, floats({5, 6}), 20), "the schema is frozen");
        CHECK_THROWS(ErrorKind::kSchemaMismatch, send(edge, floats({5, 6}), 20), "float32[5, 6]");
        const WorkPtr good = send(edge, floats({5, 5}, 20), 20);
        CHECK_EQ(good->what().sequence, 20);
        good->wait();
      },
      [](Communicator&, RecvEdge& edge) {
        std::vector<Receipt> receipts;
        for (int i = 0; i < 21; ++i) {
          receipts.push_back(edge.recv(i));
        }
        for (unsigned i = 0; i < 21; ++i) {
          check_arrived(receipts[i], floats({5, 5}, i));
        }
      });
}

TEST(edge_sends_a_schema_once_and_then_its_fingerprint) {
  // Whoever plays the receiver here looks at Control itself. Tensors without elements: headers are all there is.
  const auto shape = [](std::int64_t n) { return fill({"x", {{DType::kFloat32, false, {0, n}}}}, 1); };
  const ThreadJob job(2);
  SendEdge edge({job.communicator(0), 1}, heap());
  const std::uint64_t id = job.communicator(1)->next_edge_id(0, 1);
  std::uint64_t sequence = 0;
  // Schema `n`, of which the receiver knows `known`.
  const auto check_next = [&](std::int64_t n, bool known) {
    const std::string schema = encode_schema(shape(n).schema);
    send(edge, shape(n), static_cast<int>(n))->wait();
    const std::string body = job.control(1)->receive(0, id, Clock::now() + 20s);
    CHECK_EQ(body.size(), kHeaderBytes + (known ? 0 : schema.size()));
    const MessageHeader header = parse_header(body);
    CHECK_EQ(header.schema_bytes, known ? 0 : schema.size());
    CHECK_EQ(header.schema, fingerprint_of(schema));
    CHECK_EQ(header.sequence, sequence++);
    CHECK_EQ(header.microbatch, n);
    CHECK_EQ(header.edge, id);
  };
  check_next(1, false);
  check_next(1, true);
  check_next(2, false);
  check_next(1, true);
  check_next(2, true);
  for (std::int64_t n = 3; n <= 64; ++n) {
    check_next(n, false);
  }
  check_next(1, true);  // both ends remember 64
  check_next(65, false);
  check_next(2, true);
  check_next(1, false);  // it was the oldest
  CHECK(!job.control(1)->try_receive(0, id, Deadline{}));
}

TEST(schema_book_forgets_the_oldest_by_number_and_by_weight) {
  const auto known = [](std::uint64_t fingerprint, std::size_t bytes) {
    return KnownSchema::read(encode_schema({std::string(bytes, 'x'), {}}), fingerprint);
  };
  SchemaBook book;
  for (std::uint64_t n = 0; n < SchemaBook::kMost; ++n) {
    CHECK(!book.add(known(n, 100)));
  }
  CHECK(book.add(known(64, 100)));
  CHECK(book.find(0) == nullptr && book.find(1) != nullptr);
  CHECK(book.add(known(1, 101)));  // another schema of that fingerprint is the newest
  CHECK(book.add(known(65, 100)));
  CHECK(book.find(2) == nullptr && book.find(1) != nullptr);

  const std::size_t third = SchemaBook::kMostWeight / 3 - 100;
  CHECK(book.add(known(70, third)) && book.add(known(71, third)) && book.add(known(72, third)));
  CHECK(book.weight() <= SchemaBook::kMostWeight);
  CHECK(book.find(70) != nullptr && book.find(71) != nullptr && book.find(72) != nullptr);
  CHECK(book.add(known(73, third)));
  CHECK(book.find(70) == nullptr && book.find(71) != nullptr);
  // Tensors weigh what they take once they are parsed. The newest stays, whatever it weighs.
  Schema many{"x", {}};
  many.tensors.resize(SchemaBook::kMostWeight / KnownSchema::kTensorWeight + 1);
  CHECK(book.add(KnownSchema::read(encode_schema(many), 74)));
  CHECK(book.find(73) == nullptr && book.find(74) != nullptr);
  CHECK(book.weight() > SchemaBook::kMostWeight);
  CHECK(book.add(known(75, 1)));
  CHECK(book.find(74) == nullptr && book.find(75) != nullptr);
}

TEST(edge_long_schemas_are_forgotten_on_both_ends_alike) {
  // Three do not fit; each comes as it is, whether it was known, forgotten or never seen.
  const std::vector<unsigned> order{0, 1, 0, 2, 1, 1, 0, 2, 2, 0};
  const auto packet = [](unsigned n) {
    return fill(
        {std::string(SchemaBook::kMostWeight * 2 / 5, static_cast<char>('a' + n)), {{DType::kFloat32, false, {3}}}}, n);
  };
  run_pair(
      SchemaMode::kPerMessage,
      [&](Communicator&, SendEdge& edge) {
        for (const unsigned n : order) {
          send(edge, packet(n))->wait();
        }
      },
      [&](Communicator&, RecvEdge& edge) {
        for (const unsigned n : order) {
          check_arrived(edge.recv(-1), packet(n));
        }
      });
}

TEST(edge_refuses_tensors_larger_than_memory_can_be) {
  // As an expanded tensor is: it has few elements of its own, and would travel whole.
  const Schema huge{"x", {{DType::kFloat32, false, {std::int64_t{1} << 62}}}};
  run_pair(
      SchemaMode::kPerMessage,
      [&](Communicator&, SendEdge& edge) {
        CHECK_THROWS(ErrorKind::kInvalidArgument, edge.send(huge, {nullptr}, nullptr, 7),
                     "send: edge 0->1, message #0, microbatch 7: it cannot travel (message schema has a tensor larger "
                     "than memory can be)");
        send(edge, floats({2}))->wait();
      },
      [](Communicator&, RecvEdge& edge) { check_arrived(edge.recv(-1), floats({2})); });
}

TEST(edge_frozen_messages_are_their_payload_and_nothing_else) {
  constexpr std::size_t kBytes = 5 * 5 * 4;
  const ThreadJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 0) {
      SendEdge edge({world, 1, SchemaMode::kFrozen}, heap());
      for (unsigned i = 0; i < 20; ++i) {
        send(edge, floats({5, 5}, i))->wait();
      }
      CHECK_THROWS(ErrorKind::kSchemaMismatch, send(edge, floats({5, 6})), "the schema is frozen");
      world->control().send(1, 1, "the end");
    } else {
      const std::uint64_t id = world->next_edge_id(0, 1);
      for (unsigned i = 0; i < 20; ++i) {
        std::vector<unsigned char> got(kBytes);
        world->recv({got.data(), kBytes, kBytes, DType::kUInt8, world->device()}, 0)->wait();
        CHECK(got == floats({5, 5}, i).tensors->front());
      }
      CHECK_EQ(world->control().receive(0, 1, Clock::now() + 20s), "the end");  // behind all that is on the edge's
      CHECK(parse_header(world->control().receive(0, id, Clock::now() + 20s)).frozen);
      CHECK(!world->control().try_receive(0, id, Deadline{}));
    }
  });
}

TEST(edge_ends_of_different_modes_are_told) {
  for (const bool frozen : {false, true}) {
    const ThreadJob job(2);
    const auto mode = [frozen](bool sends) { return frozen == sends ? SchemaMode::kFrozen : SchemaMode::kPerMessage; };
    SendEdge sender({job.communicator(0), 1, mode(true)}, heap());
    RecvEdge receiver({job.communicator(1), 0, mode(false)}, heap());
    const Receipt receipt = receiver.recv(-1);
    (void)send(sender, fill({"None", {}}, 1));
    check_error(
        *receipt.work, ErrorKind::kSchemaMismatch,
        str("edge 0->1, message #0: the sender's end was made with schema=\"", frozen ? "frozen" : "per_message",
            "\", this rank's with schema=\"", frozen ? "per_message" : "frozen"));
  }
}

TEST(edge_refuses_a_wrong_number_of_tensors) {
  run_pair(
      SchemaMode::kPerMessage,
      [](Communicator&, SendEdge& edge) {
        const Packet packet = floats({3});
        CHECK_THROWS(ErrorKind::kInvalidArgument, edge.send(packet.schema, {}, nullptr, 0), "has 1 tensors, got 0");
        send(edge, packet)->wait();
      },
      [](Communicator&, RecvEdge& edge) { check_arrived(edge.recv(-1), floats({3})); });
}

TEST(edge_refuses_a_peer_that_does_not_exist) {
  const auto make = [](int peer) {
    CommunicatorConfig config;
    config.name = "one";
    config.ranks = {0};
    config.stream = make_worker_stream("one");
    config.control = make_solo_control();
    return EdgeConfig{make_solo_communicator(std::move(config)), peer};
  };
  for (int peer : {-1, 0, 1}) {
    CHECK_THROWS(ErrorKind::kInvalidArgument, SendEdge(make(peer), heap()), "peer");
    CHECK_THROWS(ErrorKind::kInvalidArgument, RecvEdge(make(peer), heap()), "peer");
  }
}

TEST(edge_tells_when_another_microbatch_comes) {
  const ThreadJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 0) {
      SendEdge edge({world, 1}, heap());
      const WorkPtr first = send(edge, floats({16}, 1), 0);
      const WorkPtr second = send(edge, floats({16}, 2), 1);
      (void)job.control(0)->receive(1, 1, Clock::now() + 20s);
      world->abort(Error(ErrorKind::kClosed, "the peer gave up"));
    } else {
      RecvEdge edge({world, 0}, heap());
      const Receipt wrong = edge.recv(1);
      const Receipt next = edge.recv(1);  // asked for before the first has failed, as prefetching does
      check_error(*wrong.work, ErrorKind::kSchemaMismatch,
                  "edge 0->1 delivered microbatch 0 (float32[16]), this rank expects microbatch 1");
      // It must not hand out the payload of microbatch 0 as that of microbatch 1.
      check_error(*next.work, ErrorKind::kSchemaMismatch, "delivered microbatch 0");
      check_error(*edge.recv(-1).work, ErrorKind::kSchemaMismatch, "delivered microbatch 0");
      job.control(1)->send(0, 1, "done");
    }
  });
}

TEST(edge_tells_when_nothing_comes) {
  for (SchemaMode mode : {SchemaMode::kPerMessage, SchemaMode::kFrozen}) {
    const ThreadJob job(2, 1, 30ms);
    const auto world = job.communicator(1);
    RecvEdge edge({world, 0, mode}, heap());
    const Receipt first = edge.recv(0);
    const Receipt second = edge.recv(1);
    check_error(*first.work, ErrorKind::kTimedOut, "edge 0->1: no message came in time");
    check_error(*second.work, ErrorKind::kTimedOut, "no message came in time");
    CHECK_EQ(error_of(*first.work)->context().sequence, 0);
    CHECK_EQ(error_of(*first.work)->context().peer, 0);
  }
}

TEST(edge_refuses_headers_that_do_not_fit) {
  // Whoever plays the sender here speaks the protocol by hand, and wrong.
  const Schema schema = floats({4}).schema;
  const auto header = [&schema](std::uint64_t edge, std::uint64_t sequence, bool carries, std::uint64_t bytes = 64) {
    const auto behind = static_cast<std::uint32_t>(carries ? encode_schema(schema).size() : 0);
    return encode_header({edge, sequence, 0, schema.fingerprint(), bytes, behind, std::nullopt});
  };
  using Make = std::function<std::string(std::uint64_t)>;
  const std::vector<std::pair<Make, const char*>> cases{
      {[&](auto id) { return header(id, 1, true) + encode_schema(schema); }, "message #1"},
      {[&](auto id) { return header(id + 1, 0, true) + encode_schema(schema); }, "came where #0"},
      {[&](auto id) { return header(id, 0, false); }, "no schema that fits"},
      {[&](auto id) { return header(id, 0, false) + "x"; }, "bytes behind the header"},
      {[&](auto id) { return header(id, 0, true, 65) + encode_schema(schema); }, "no schema that fits"},
      {[&](auto id) { return header(id, 0, true) + encode_schema(floats({5}).schema); },
       "does not match its fingerprint"},
      {[&](auto id) { return header(id, 0, true) + "garbage"; }, "bytes behind the header"},
      {[&](auto) { return std::string("garbage"); }, "header has 7 bytes"},
  };
  for (const auto& [make, part] : cases) {
    const ThreadJob job(2);
    const auto world = job.communicator(1);
    RecvEdge edge({world, 0}, heap());
    const Receipt receipt = edge.recv(0);
    const std::uint64_t id = job.communicator(0)->next_edge_id(0, 1);
    job.control(0)->send(1, id, make(id));
    const std::string text = part;
    const bool counts_differ = text.starts_with("message #1") || text.starts_with("came where");
    const ErrorKind kind = counts_differ ? ErrorKind::kSchemaMismatch : ErrorKind::kProtocol;
    check_error(*receipt.work, kind, part);
    check_error(*receipt.work, kind, "edge 0->1");
    check_error(*edge.recv(1).work, kind, part);  // nothing after it can be trusted
  }
}

TEST(edge_says_so_when_a_header_comes_again) {
  // Valid both times; the second time it is that of the message before, or an older one.
  const Schema schema = floats({0}).schema;  // without a payload, so headers are all there is
  const std::string body = encode_schema(schema);
  for (const std::uint64_t again : {0, 1}) {
    const ThreadJob job(2);
    const auto world = job.communicator(1);
    RecvEdge edge({world, 0}, heap());
    const std::uint64_t id = job.communicator(0)->next_edge_id(0, 1);
    const auto say = [&](std::uint64_t sequence) {
      const auto behind = static_cast<std::uint32_t>(body.size());
      job.control(0)->send(1, id,
                           encode_header({id, sequence, -1, schema.fingerprint(), 0, behind, std::nullopt}) + body);
    };
    for (const std::uint64_t sequence : {0, 1}) {
      say(sequence);
      CHECK(!error_of(*edge.recv(-1).work));
    }
    say(again);
    check_error(*edge.recv(-1).work, ErrorKind::kProtocol,
                str("edge 0->1: message #", again, " was received before, its header was repeated; #2 is due"));
  }
}

// --- Ends ------------------------------------------------------------------------------------------------------------
// "Soon": with the error of the end, where what nobody ends becomes a time-out of 20 s.

TEST(edge_receipts_end_soon_when_the_peer_fails) {
  for (const bool orderly : {false, true}) {
    const ThreadJob job(2);
    const auto world = job.communicator(1);
    RecvEdge edge({world, 0}, heap());
    const Receipt running = edge.recv(-1);
    const Receipt queued = edge.recv(-1);
    std::this_thread::sleep_for(2ms);
    if (orderly) {
      job.control(0)->close();
    } else {
      job.control(0)->abort("it broke");
    }
    for (const Receipt* receipt : {&running, &queued}) {
      check_error(*receipt->work, orderly ? ErrorKind::kRankFailed : ErrorKind::kPeerError,
                  orderly ? "rank 0 has left the job" : "it broke");
    }
  }
}

TEST(edge_receipts_end_soon_when_their_communicator_is_aborted) {
  const ThreadJob job(2);
  const auto world = job.communicator(1);
  RecvEdge edge({world, 0}, heap());
  const Receipt running = edge.recv(-1);
  const Receipt queued = edge.recv(-1);
  std::this_thread::sleep_for(2ms);
  world->abort(Error(ErrorKind::kClosed, "enough"));
  check_error(*running.work, ErrorKind::kClosed, "enough");
  check_error(*queued.work, ErrorKind::kClosed, "enough");
}

TEST(edge_may_be_destroyed_with_pending_receipts) {
  for (int round = 0; round < 20; ++round) {
    const ThreadJob job(2);
    auto world = job.communicator(1);
    auto edge = std::make_unique<RecvEdge>(EdgeConfig{world, 0}, heap());
    const Receipt running = edge->recv(-1);
    const Receipt queued = edge->recv(-1);
    std::this_thread::sleep_for(std::chrono::microseconds(round * 10));
    edge.reset();
    if (round % 2 == 0) {
      world.reset();
    }
    // Both: the lane must not be held by a message that nobody wants any more.
    for (const Receipt* receipt : {&running, &queued}) {
      check_error(*receipt->work, ErrorKind::kClosed, "");
    }
    if (world != nullptr) {
      world->stream().synchronize();  // the lane is free again
    }
  }
}

TEST(edge_and_last_communicator_may_go_together) {
  for (int round = 0; round < 20; ++round) {
    const ThreadJob job(2);
    Receipt receipt;
    {
      RecvEdge edge({job.communicator(1), 0}, heap());
      receipt = edge.recv(-1);
      std::this_thread::sleep_for(std::chrono::microseconds(round * 10));
    }
    check_error(*receipt.work, ErrorKind::kClosed, "");
  }
}

// What a send was given must live until the lane has read it, also when issuing fails half-way.
TEST(edge_send_that_fails_while_issuing_leaves_no_dangling_copy) {
  const ThreadJob job(2);
  const auto world = job.communicator(0);
  SendEdge edge({world, 1}, heap());
  std::atomic<bool> gate = false;
  world->stream().enqueue([&gate] {
    while (!gate) {
      std::this_thread::sleep_for(50us);
    }
  });
  world->abort(Error(ErrorKind::kClosed, "enough"));
  {
    const Packet packet = fill({"two", {{DType::kFloat32, false, {1000}}, {DType::kInt64, false, {1000}}}}, 1);
    CHECK_THROWS(ErrorKind::kClosed, send(edge, packet), "enough");
  }
  gate = true;  // a copy that was enqueued before the failure runs now: on freed memory, if nobody held it
  world->stream().synchronize();
}

TEST(edge_payload_outlives_everything) {
  Receipt receipt;
  const Packet packet = random_packet(7);
  {
    const ThreadJob job(2);
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      if (rank == 0) {
        SendEdge edge({world, 1}, heap());
        send(edge, packet)->wait();
      } else {
        RecvEdge edge({world, 0}, heap());
        receipt = edge.recv(-1);
        receipt.work->wait();
      }
    });
  }
  check_arrived(receipt, packet);
}

// --- Behind the header, in Control -----------------------------------------------------------------------------------

namespace {

// Up to so many bytes travel behind their header there, in what follows.
constexpr std::size_t kCarried = 4096;

void carry(Communicator& world) { dynamic_cast<ThreadCommunicator&>(world).carry_in_control(kCarried); }

Packet bytes_of(std::int64_t count, unsigned seed) {
  return fill({"bytes", {{DType::kUInt8, false, {count}}, {DType::kFloat64, true, {}}}}, seed);
}

}  // namespace

TEST(edge_small_messages_keep_their_order_among_large_ones) {
  constexpr unsigned kMessages = 400;
  const auto packet = [](unsigned i) {
    return i % 3 == 0 ? random_packet(i) : bytes_of(i % 7 * 1000, i);  // 7000 B and some are too many for Control
  };
  for (const bool is_ahead : {true, false}) {
    run_pair(
        SchemaMode::kPerMessage,
        [&](Communicator& world, SendEdge&) {
          carry(world);
          SendEdge edge({std::shared_ptr<Communicator>(&world, [](Communicator*) {}), 1}, heap());
          std::vector<WorkPtr> works;
          for (unsigned i = 0; i < kMessages; ++i) {
            works.push_back(send(edge, packet(i), static_cast<int>(i)));
            if (!is_ahead) {
              works.back()->wait();
            }
          }
          for (const WorkPtr& work : works) {
            work->wait();
          }
        },
        [&](Communicator& world, RecvEdge&) {
          carry(world);
          RecvEdge edge({std::shared_ptr<Communicator>(&world, [](Communicator*) {}), 0}, heap());
          OpOptions here;
          here.inline_when_idle = true;
          for (unsigned i = 0; i < kMessages; ++i) {
            const Receipt receipt = edge.recv(static_cast<int>(i), i % 5 == 0 ? OpOptions{} : here);
            receipt.work->wait();
            check_arrived(receipt, packet(i));
          }
        });
  }
}

// They have headers there, which cost nothing: the receiver need not be at them, and notices another microbatch.
TEST(edge_frozen_messages_go_behind_their_headers_as_others_do) {
  run_pair(
      SchemaMode::kFrozen,
      [](Communicator& world, SendEdge&) {
        carry(world);
        SendEdge edge({std::shared_ptr<Communicator>(&world, [](Communicator*) {}), 1, SchemaMode::kFrozen}, heap());
        for (unsigned i = 0; i < 20; ++i) {
          const WorkPtr work = send(edge, bytes_of(1000, i), static_cast<int>(i));
          if (i < 4) {  // within the window
            CHECK(work->done());
          }
          work->wait();
        }
        CHECK_THROWS(ErrorKind::kSchemaMismatch, send(edge, bytes_of(1001, 20), 20), "the schema is frozen");
        world.control().send(1, 1, "sent");
        (void)send(edge, bytes_of(1000, 20), 21);
      },
      [](Communicator& world, RecvEdge&) {
        carry(world);
        RecvEdge edge({std::shared_ptr<Communicator>(&world, [](Communicator*) {}), 0, SchemaMode::kFrozen}, heap());
        for (unsigned i = 0; i < 20; ++i) {
          check_arrived(edge.recv(static_cast<int>(i)), bytes_of(1000, i));
        }
        CHECK_EQ(world.control().receive(0, 1, Clock::now() + 20s), "sent");
        check_error(*edge.recv(20).work, ErrorKind::kSchemaMismatch, "delivered microbatch 21");
      });
}

TEST(edge_frozen_message_with_another_schema_is_refused) {
  const ThreadJob job(2);
  const auto world = job.communicator(1);
  carry(*world);
  RecvEdge edge({world, 0, SchemaMode::kFrozen}, heap());
  const std::uint64_t id = job.communicator(0)->next_edge_id(0, 1);
  const auto tell = [&](std::uint64_t sequence, std::int64_t count) {
    const std::string schema = encode_schema(bytes_of(count, 1).schema);
    const std::uint64_t bytes = Parcel(bytes_of(count, 1).schema).bytes();
    MessageHeader header{
        id, sequence, -1, fingerprint_of(schema), bytes, static_cast<std::uint32_t>(schema.size()), std::nullopt};
    header.frozen = true;
    job.control(0)->send(1, id, encode_header(header) + std::string(bytes, 'p') + schema);
  };
  const Receipt first = edge.recv(-1);
  tell(0, 8);
  first.work->wait();
  const Receipt second = edge.recv(-1);
  tell(1, 9);
  check_error(*second.work, ErrorKind::kProtocol, "another schema than the first one");
}

// A receiver that waits has long messages come behind their headers, after the first one: these end without a lane.
TEST(edge_long_messages_come_behind_their_header_where_they_are_waited_for) {
  constexpr unsigned kEdges = 3;
  constexpr unsigned kMessages = 15;
  const auto packet = [](unsigned edge, unsigned i) {
    const std::int64_t count = i % 4 == 0 ? 100 : 70000 + 450000 * (i % 5);  // up to 1.9 MB, in pieces
    Schema schema{"long", {{DType::kFloat32, false, {3}}, {DType::kUInt8, false, {count}}, {DType::kInt64, true, {5}}}};
    schema.tensors.push_back({DType::kUInt8, false, {count / 2 + 1}});
    schema.direct_from = i % 3 == 0 ? kDirectFrom : 1000;
    return fill(schema, edge * 1000 + i);
  };
  ThreadJob(2).run([&](const std::shared_ptr<Communicator>& world) {
    std::vector<std::thread> threads;
    std::vector<std::shared_ptr<Communicator>> lanes;
    std::vector<std::unique_ptr<SendEdge>> out;
    std::vector<std::unique_ptr<RecvEdge>> in;
    for (unsigned e = 0; e < kEdges; ++e) {
      for (const char* way : {"0 to 1, ", "1 to 0, "}) {
        lanes.push_back(world->subgroup({0, 1}, str(way, e)));
        carry(*lanes.back());
      }
      out.push_back(std::make_unique<SendEdge>(
          EdgeConfig{lanes[2 * e + (world->rank() == 0 ? 0 : 1)], 1 - world->rank()}, heap()));
      in.push_back(std::make_unique<RecvEdge>(
          EdgeConfig{lanes[2 * e + (world->rank() == 0 ? 1 : 0)], 1 - world->rank()}, heap()));
    }
    for (unsigned e = 0; e < kEdges; ++e) {
      threads.emplace_back([&, e] {  // back and forth: each waits for the other
        OpOptions here;
        here.inline_when_idle = true;
        for (unsigned i = 0; i < kMessages; ++i) {
          WorkPtr sent;
          if (world->rank() == 0) {
            sent = send(*out[e], packet(e, i), static_cast<int>(i));
          }
          check_arrived(in[e]->recv(static_cast<int>(i), i % 3 == 0 ? OpOptions{} : here), packet(e, i));
          if (world->rank() == 1) {
            sent = send(*out[e], packet(e, i), static_cast<int>(i));
          }
          CHECK(!error_of(*sent));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  });
}

// What nobody waits for does not pile up: it goes by the lane, which buffers nothing here.
TEST(edge_long_messages_that_nobody_waits_for_stay_with_their_sender) {
  std::promise<void> looked;
  const auto packet = [](unsigned i) { return bytes_of(100000, i); };
  run_pair(
      SchemaMode::kPerMessage,
      [&](Communicator& world, SendEdge&) {
        carry(world);
        SendEdge edge({std::shared_ptr<Communicator>(&world, [](Communicator*) {}), 1}, heap());
        CHECK(!error_of(*send(edge, packet(0))));  // by the lane: from now on they are asked for
        std::vector<WorkPtr> works;
        for (unsigned i = 1; i < 6; ++i) {
          works.push_back(send(edge, packet(i)));
        }
        CHECK(!works.back()->done());
        looked.set_value();
        for (const WorkPtr& work : works) {
          CHECK(!error_of(*work));
        }
      },
      [&](Communicator& world, RecvEdge&) {
        carry(world);
        RecvEdge edge({std::shared_ptr<Communicator>(&world, [](Communicator*) {}), 0}, heap());
        check_arrived(edge.recv(-1), packet(0));
        looked.get_future().wait();
        for (unsigned i = 1; i < 6; ++i) {
          check_arrived(edge.recv(-1), packet(i));
        }
      });
}

TEST(edge_leaves_no_more_than_its_slots_in_control) {
  std::promise<void> looked;
  run_pair(
      SchemaMode::kPerMessage,
      [&](Communicator& world, SendEdge&) {
        carry(world);
        SendEdge edge({std::shared_ptr<Communicator>(&world, [](Communicator*) {}), 1}, heap());
        const Packet packet = fill({"bytes", {{DType::kUInt8, false, {kCarried}}}}, 1);
        std::vector<WorkPtr> works;
        for (int i = 0; i < 12; ++i) {
          works.push_back(send(edge, packet));
          // Four slots. The others wait for the receiver, for nothing is buffered on this communicator.
          CHECK_EQ(works.back()->done(), i < 4);
        }
        looked.set_value();
        for (const WorkPtr& work : works) {
          work->wait();
        }
        // What was taken has made room, once the word of it is here.
        const Deadline soon = Clock::now() + 20s;
        WorkPtr last = send(edge, packet);
        while (!last->done() && Clock::now() < soon) {
          last->wait();
          last = send(edge, packet);
        }
        CHECK(last->done());
        send(edge, fill({"the end", {}}, 1))->wait();
      },
      [&](Communicator& world, RecvEdge&) {
        carry(world);
        RecvEdge edge({std::shared_ptr<Communicator>(&world, [](Communicator*) {}), 0}, heap());
        looked.get_future().wait();
        for (;;) {
          const Receipt receipt = edge.recv(-1);
          receipt.work->wait();
          if (receipt.message->schema().structure == "the end") {
            break;
          }
          CHECK_EQ(receipt.message->schema().tensors.size(), 1U);
        }
      });
}

TEST(edge_refuses_payloads_behind_the_header_that_do_not_fit) {
  const Schema schema = floats({4}).schema;  // 16 bytes, on a cache line
  const std::string body = encode_schema(schema);
  const auto header = [&](std::uint64_t id, std::uint64_t bytes) {
    const auto behind = static_cast<std::uint32_t>(body.size());
    return encode_header({id, 0, 0, schema.fingerprint(), bytes, behind, std::nullopt});
  };
  struct Case {
    std::size_t carried;
    std::size_t announced;
    std::size_t there;
    const char* part;
  };
  for (const Case& one : {Case{kCarried, 64, 63, "bytes behind the header"}, Case{kCarried, 64, 65, "bytes behind"},
                          Case{kCarried, 32, 32, "no schema that fits"}, Case{0, 64, 64, "bytes behind the header"},
                          Case{kCarried, kCarried + 1, kCarried + 1, "bytes behind the header"}}) {
    const ThreadJob job(2);
    const auto world = job.communicator(1);
    dynamic_cast<ThreadCommunicator&>(*world).carry_in_control(one.carried);
    RecvEdge edge({world, 0}, heap());
    const Receipt receipt = edge.recv(0);
    const std::uint64_t id = job.communicator(0)->next_edge_id(0, 1);
    job.control(0)->send(1, id, header(id, one.announced) + std::string(one.there, 'p') + body);
    check_error(*receipt.work, ErrorKind::kProtocol, one.part);
  }
}

// --- Slots -----------------------------------------------------------------------------------------------------------

TEST(edge_uses_its_slots_again) {
  const auto allocator = std::make_shared<HeapAllocator>();
  ThreadJob(2).run([&](const std::shared_ptr<Communicator>& world) {
    const Packet packet = fill({"two", {{DType::kFloat32, false, {100}}, {DType::kInt64, false, {100}}}}, 1);
    if (world->rank() == 0) {
      SendEdge edge({world, 1}, heap());
      for (int i = 0; i < 100; ++i) {
        send(edge, packet)->wait();
      }
    } else {
      RecvEdge edge({world, 0}, allocator);
      for (int i = 0; i < 100; ++i) {
        check_arrived(edge.recv(-1), packet);  // the message ends with the statement
      }
    }
  });
  // One in use, and one more while a task that has just ended still holds its own.
  CHECK(allocator->allocations <= 3);
}

TEST(edge_makes_slots_of_a_known_size_beforehand) {
  const Packet packet = fill({"two", {{DType::kFloat32, false, {100}}, {DType::kInt64, false, {100}}}}, 1);
  const std::size_t bytes = Parcel(packet.schema).bytes();
  const auto sending = std::make_shared<HeapAllocator>();
  const auto receiving = std::make_shared<HeapAllocator>();
  ThreadJob(2).run([&](const std::shared_ptr<Communicator>& world) {
    EdgeConfig config{world, 1 - world->rank()};
    config.slots = 3;
    config.slot_bytes = bytes;
    if (world->rank() == 0) {
      SendEdge edge(config, sending);
      CHECK_EQ(edge.slot_bytes(), 3 * bytes);
      for (int i = 0; i < 50; ++i) {
        send(edge, packet)->wait();
      }
      CHECK_EQ(edge.slot_bytes(), 3 * bytes);
    } else {
      RecvEdge edge(config, receiving);
      CHECK_EQ(receiving->allocations.load(), 3);
      for (int i = 0; i < 50; ++i) {
        check_arrived(edge.recv(-1), packet);
      }
    }
  });
  CHECK_EQ(sending->allocations.load(), 3);
  CHECK_EQ(receiving->allocations.load(), 3);
}
