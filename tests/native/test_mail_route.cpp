// engine/mail_send, engine/mail_recv and engine/loans: messages through memory that both ends see.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/peer_memory.h"
#include "engine/edge.h"
#include "engine/loans.h"
#include "native/check.h"
#include "native/shm_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

using Blocks = std::vector<std::vector<unsigned char>>;

// Bytes that tell message, tensor and place.
std::shared_ptr<Blocks> blocks_of(const Schema& schema, unsigned message) {
  auto blocks = std::make_shared<Blocks>();
  for (const TensorSchema& tensor : schema.tensors) {
    std::vector<unsigned char> block(tensor.count() * size_of(tensor.dtype));
    for (std::size_t i = 0; i < block.size(); ++i) {
      block[i] = static_cast<unsigned char>(i * 7 + message * 31 + blocks->size() * 3);
    }
    blocks->push_back(std::move(block));
  }
  return blocks;
}

WorkPtr send(SendEdge& edge, const Schema& schema, unsigned message, int microbatch = -1) {
  const auto blocks = blocks_of(schema, message);
  std::vector<Source> sources;
  for (const auto& block : *blocks) {
    sources.emplace_back(block.empty() ? nullptr : static_cast<const void*>(block.data()));
  }
  return edge.send(schema, sources, blocks, microbatch);
}

bool is_message(const Incoming& incoming, const Schema& schema, unsigned message) {
  const auto blocks = blocks_of(schema, message);
  for (std::size_t i = 0; i < blocks->size(); ++i) {
    const auto& block = (*blocks)[i];
    if (!block.empty() && std::memcmp(incoming.data(i), block.data(), block.size()) != 0) {
      return false;
    }
  }
  return incoming.schema() == schema;
}

Schema of_sizes(const std::vector<std::int64_t>& bytes, std::uint64_t direct_from = 4096) {
  Schema schema;
  for (const std::int64_t size : bytes) {
    schema.tensors.push_back({DType::kUInt8, false, {size}});
  }
  schema.direct_from = direct_from;
  return schema;
}

std::shared_ptr<HeapAllocator> heap() { return std::make_shared<HeapAllocator>(); }

// What a sender would write ahead of message `sequence`; the first one announces the schema.
MessageHeader header_of(const Schema& schema, std::uint64_t edge, std::uint64_t sequence = 0) {
  MessageHeader header{edge, sequence, -1, schema.fingerprint(), Parcel(schema).bytes(), 0, std::nullopt};
  header.schema_bytes = sequence == 0 ? static_cast<std::uint32_t>(encode_schema(schema).size()) : 0;
  return header;
}

// Its mail, with the `tiny` bytes of a message that travels behind its header.
std::string forge(const MessageHeader& header, std::size_t tiny = 0) {
  return encode_header(header) + std::string(tiny, 'x');
}

WorkPtr post(Communicator& world, std::string& bytes, std::uint64_t edge) {
  return world.mailbox()->send({bytes.data(), bytes.size(), bytes.size(), DType::kUInt8, {}}, 1, edge, {});
}

Receipt take(RecvEdge& edge, int microbatch = -1) {
  OpOptions here;
  here.inline_when_idle = true;
  Receipt receipt = edge.recv(microbatch, here);
  receipt.work->wait();
  return receipt;
}

// sender(world, edge) on rank 0 and receiver(world, edge, its allocator) on rank 1.
template <typename Sender, typename Receiver>
void run_pair(const Sender& sender, const Receiver& receiver, SchemaMode mode = SchemaMode::kPerMessage) {
  const ShmJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    EdgeConfig config;
    config.communicator = world;
    config.peer = 1 - rank;
    config.mode = mode;
    const auto allocator = heap();
    if (rank == 0) {
      SendEdge edge(config, allocator);
      sender(*world, edge);
      world->barrier()->wait();
    } else {
      RecvEdge edge(config, allocator);
      receiver(*world, edge, *allocator);
      world->barrier()->wait();
    }
  });
}

// Where a message lies in a block, one of a frozen edge takes the same way.
constexpr std::array kModes{SchemaMode::kPerMessage, SchemaMode::kFrozen};

}  // namespace

TEST(mail_carries_packed_and_direct_tensors) {
  const std::vector<Schema> schemas{of_sizes({10, 5000, 0, 4095, 4096, 1}),
                                    of_sizes({7}),
                                    of_sizes({}),
                                    of_sizes({1 << 20, 3}),
                                    of_sizes({100, 200}),
                                    of_sizes({0, 0})};
  for (const SchemaMode mode : {SchemaMode::kPerMessage, SchemaMode::kFrozen}) {
    for (const Schema& only : schemas) {
      const auto schema_of = [&](unsigned i) {
        return mode == SchemaMode::kFrozen ? only : schemas[i % schemas.size()];
      };
      run_pair(
          [&](Communicator&, SendEdge& edge) {
            for (unsigned i = 0; i < 20; ++i) {
              send(edge, schema_of(i), i)->wait();
            }
          },
          [&](Communicator&, RecvEdge& edge, HeapAllocator&) {
            for (unsigned i = 0; i < 20; ++i) {
              CHECK(is_message(*take(edge).message, schema_of(i), i));
            }
          },
          mode);
      if (mode == SchemaMode::kPerMessage) {
        break;
      }
    }
  }
}

TEST(mail_receipts_on_the_lane_and_here_keep_their_order) {
  const Schema schema = of_sizes({100, 9000, 50});
  run_pair(
      [&](Communicator&, SendEdge& edge) {
        std::vector<WorkPtr> works;
        for (unsigned i = 0; i < 60; ++i) {
          works.push_back(send(edge, schema, i, static_cast<int>(i)));
        }
        for (const WorkPtr& work : works) {
          work->wait();
        }
      },
      [&](Communicator&, RecvEdge& edge, HeapAllocator&) {
        for (unsigned i = 0; i < 60; i += 3) {
          const Receipt first = edge.recv(static_cast<int>(i));
          const Receipt second = edge.recv(static_cast<int>(i + 1));
          const Receipt third = take(edge, static_cast<int>(i + 2));
          first.work->wait();
          second.work->wait();
          CHECK(is_message(*first.message, schema, i));
          CHECK(is_message(*second.message, schema, i + 1));
          CHECK(is_message(*third.message, schema, i + 2));
        }
      });
}

TEST(mail_packed_tensors_are_read_where_the_sender_wrote_them) {
  const Schema schema = of_sizes({100, 200, 300});
  for (const SchemaMode mode : kModes) {
    run_pair(
        [&](Communicator&, SendEdge& edge) {
          for (unsigned i = 0; i < 50; ++i) {
            send(edge, schema, i)->wait();
          }
          CHECK(edge.slot_bytes() <= 4 * (64 + 3 * 320));
        },
        [&](Communicator&, RecvEdge& edge, HeapAllocator& allocator) {
          const Receipt first = take(edge);
          for (unsigned i = 1; i < 50; ++i) {
            CHECK(is_message(*take(edge).message, schema, i));
          }
          CHECK(is_message(*first.message, schema, 0));  // kept all the while
          // The schema of the first message, and nothing else.
          CHECK_EQ(allocator.allocations.load(), 1);
        },
        mode);
  }
}

TEST(mail_sender_that_is_ahead_waits_and_takes_no_more_memory) {
  const Schema schema = of_sizes({1000, 1000});
  for (const SchemaMode mode : kModes) {
    std::atomic<int> ended = 0;
    run_pair(
        [&](Communicator& world, SendEdge& edge) {
          std::vector<WorkPtr> works;
          for (unsigned i = 0; i < 40; ++i) {
            works.push_back(send(edge, schema, i));
          }
          const auto count = [&works] {
            return static_cast<int>(
                std::count_if(works.begin(), works.end(), [](const WorkPtr& work) { return work->done(); }));
          };
          CHECK(eventually([&] { return count() >= 4; }));  // each has a block of its own
          std::this_thread::sleep_for(20ms);                // and no other gets one
          ended = count();
          CHECK(edge.slot_bytes() <= 4 * (64 + 2 * 1024));
          world.control().send(1, 1, "sent");
          for (const WorkPtr& work : works) {
            work->wait();
          }
          CHECK(edge.slot_bytes() <= 4 * (64 + 2 * 1024));
        },
        [&](Communicator& world, RecvEdge& edge, HeapAllocator&) {
          (void)world.control().receive(0, 1, Clock::now() + 20s);
          for (unsigned i = 0; i < 40; ++i) {
            CHECK(is_message(*take(edge).message, schema, i));
          }
        },
        mode);
    CHECK_EQ(ended.load(), 4);
  }
}

TEST(mail_receiver_that_keeps_messages_does_not_stop_the_sender) {
  const Schema schema = of_sizes({1000, 1000});
  for (const SchemaMode mode : kModes) {
    run_pair(
        [&](Communicator&, SendEdge& edge) {
          for (unsigned i = 0; i < 40; ++i) {
            send(edge, schema, i)->wait();
          }
        },
        [&](Communicator&, RecvEdge& edge, HeapAllocator&) {
          std::vector<Receipt> kept;
          for (unsigned i = 0; i < 40; ++i) {
            kept.push_back(take(edge));
          }
          for (unsigned i = 0; i < 40; ++i) {
            CHECK(is_message(*kept[i].message, schema, i));
          }
        },
        mode);
  }
}

TEST(mail_messages_outlive_everything) {
  const Schema schema = of_sizes({100, 200});
  Receipt kept;
  run_pair([&](Communicator&, SendEdge& edge) { send(edge, schema, 5)->wait(); },
           [&](Communicator&, RecvEdge& edge, HeapAllocator&) { kept = take(edge); });
  CHECK(is_message(*kept.message, schema, 5));
}

TEST(mail_another_microbatch_is_told_to_both) {
  const Schema schema = of_sizes({100, 200});
  for (const SchemaMode mode : kModes) {
    const ShmJob job(2);
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      EdgeConfig config;
      config.communicator = world;
      config.peer = 1 - rank;
      config.mode = mode;
      if (rank == 0) {
        SendEdge edge(config, heap());
        send(edge, schema, 0, 2)->wait();
        send(edge, schema, 0, 3)->wait();
        (void)job.control(0)->receive(1, 1, Clock::now() + 20s);  // behind the refusal
        std::this_thread::sleep_for(10ms);                        // it looks for one every 5 ms
        CHECK_THROWS(ErrorKind::kSchemaMismatch, send(edge, schema, 1, 4),
                     "rank 1 refused a message of this rank: edge 0->1 delivered microbatch 3");
      } else {
        RecvEdge edge(config, heap());
        (void)take(edge, 2);
        CHECK_THROWS(ErrorKind::kSchemaMismatch, take(edge, 4), "expects microbatch 4");
        job.control(1)->send(0, 1, "told");
      }
    });
  }
}

TEST(mail_other_tensors_than_expected_are_told_to_both) {
  for (const std::int64_t bytes : {200, 300 << 10}) {  // packed, and too large for the ring
    const ShmJob job(2);
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      EdgeConfig config;
      config.communicator = world;
      config.peer = 1 - rank;
      const Schema schema = of_sizes({100, bytes, 1 << 22});
      if (rank == 0) {
        SendEdge edge(config, heap());
        // Its last tensor waits for a receiver that will never take it.
        CHECK_THROWS(ErrorKind::kSchemaMismatch, send(edge, schema, 0, 3)->wait(), "tensor 1: uint8[");
      } else {
        RecvEdge edge(config, heap());
        auto expected = std::make_shared<Schema>(of_sizes({100, 7, 1 << 22}));
        edge.expect(expected);
        CHECK_THROWS(ErrorKind::kSchemaMismatch, take(edge), "instead of uint8[7]");
        CHECK(eventually([&] { return job.control(1)->has_left(0); }));
      }
      job.control(rank)->close();
    });
  }
}

TEST(mail_headers_that_do_not_fit_are_refused) {
  const Schema schema = of_sizes({100, 200});
  const std::string body = encode_schema(schema);
  const auto header = [&](std::uint64_t id) {
    MessageHeader good = header_of(schema, id);
    good.lent = MessageHeader::Lent{0, 0};
    return good;
  };
  using Spoil = std::function<void(MessageHeader&)>;
  const std::vector<std::pair<Spoil, const char*>> cases{
      {[](MessageHeader& h) { h.sequence = 7; }, "message #7"},
      {[](MessageHeader& h) { ++h.edge; }, "came where #0"},
      {[](MessageHeader& h) { ++h.schema; }, "does not match its fingerprint"},
      {[](MessageHeader& h) { h.payload_bytes = 1; }, "no schema that fits"},
      {[](MessageHeader& h) { h.lent->offset = 1; }, "not aligned"},
      {[](MessageHeader& h) { h.lent->offset = std::uint64_t{1} << 40; }, "not in its arena"},
  };
  for (const auto& [spoil, part] : cases) {
    const ShmJob job(2);
    run_ranks(2, [&, &spoil = spoil, part = part](int rank) {
      const auto world = job.communicator(rank);
      const Buffer some = world->allocate(4096);  // so that there is an arena
      if (rank == 0) {
        const std::uint64_t id = world->next_edge_id(0, 1);
        MessageHeader bad = header(id);
        spoil(bad);
        std::string first = forge(bad);
        std::string second = body;
        for (std::string* bytes : {&first, &second}) {
          (void)post(*world, *bytes, id);
        }
        (void)job.control(0)->receive(1, 1, Clock::now() + 20s);
      } else {
        EdgeConfig config;
        config.communicator = world;
        config.peer = 0;
        RecvEdge edge(config, heap());
        const std::string text = part;
        const bool counts_differ = text.starts_with("message #7") || text.starts_with("came where");
        CHECK_THROWS(counts_differ ? ErrorKind::kSchemaMismatch : ErrorKind::kProtocol, take(edge), part);
        job.control(1)->send(0, 1, "seen");
      }
    });
  }
}

TEST(mail_with_more_or_less_than_its_header_says_is_refused) {
  const Schema tiny = of_sizes({100});
  const Schema larger = of_sizes({1000, 3000});
  const auto tiny_bytes = static_cast<std::ptrdiff_t>(Parcel(tiny).bytes());
  const std::ptrdiff_t header_bytes = kHeaderBytes;
  for (const auto& [schema, behind] : {std::pair(&tiny, tiny_bytes - 1),
                                       {&tiny, tiny_bytes + 1},
                                       {&tiny, 0L},
                                       {&larger, 1L},
                                       {&tiny, -1L},
                                       {&tiny, -header_bytes}}) {
    const ShmJob job(2);
    run_ranks(2, [&, schema = schema, behind = behind](int rank) {
      const auto world = job.communicator(rank);
      if (rank == 0) {
        const std::uint64_t id = world->next_edge_id(0, 1);
        std::string first = forge(header_of(*schema, id), 192);
        first.resize(static_cast<std::size_t>(header_bytes + behind));
        std::string second = encode_schema(*schema);
        (void)post(*world, first, id);
        (void)post(*world, second, id);
        (void)job.control(0)->receive(1, 1, Clock::now() + 20s);
      } else {
        EdgeConfig config;
        config.communicator = world;
        config.peer = 0;
        RecvEdge edge(config, heap());
        CHECK_THROWS(ErrorKind::kProtocol, take(edge), behind < 0 ? "header" : str(header_bytes + behind, " bytes"));
        job.control(1)->send(0, 1, "seen");
      }
    });
  }
}

// The receiver hears of a block while the sender still fills it: it is told the places, and waits for the bytes.
TEST(mail_names_a_block_before_it_is_full) {
  const Schema schema = of_sizes({1000, 3000});
  const std::string body = encode_schema(schema);
  const ShmJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 0) {
      const std::uint64_t id = world->next_edge_id(0, 1);
      const Parcel parcel(schema);
      LoanPool pool(world->peer_memory(), 2, parcel.packed.bytes());
      for (const bool fills : {true, false}) {
        const auto loan = pool.lend(parcel.packed.bytes());
        MessageHeader header = header_of(schema, id, fills ? 0 : 1);
        header.lent = MessageHeader::Lent{loan->place.segment, loan->place.offset};
        std::string first = forge(header);
        std::string second = body;
        post(*world, first, id)->wait();
        if (fills) {
          post(*world, second, id)->wait();
        }
        (void)job.control(0)->receive(1, 1, Clock::now() + 20s);  // it knows the places
        if (!fills) {
          break;
        }
        std::this_thread::sleep_for(3ms);
        const auto blocks = blocks_of(schema, 5);
        for (std::size_t i = 0; i < blocks->size(); ++i) {
          std::memcpy(loan->payload + parcel.packed.entries()[i].offset, (*blocks)[i].data(), (*blocks)[i].size());
        }
        LoanPool::fill(*loan);
      }
      job.control(0)->abort("it fell over its own feet");
    } else {
      EdgeConfig config;
      config.communicator = world;
      config.peer = 0;
      RecvEdge edge(config, heap());
      OpOptions here;
      here.inline_when_idle = true;
      const void* place = nullptr;
      const auto placed = [&](const Incoming& incoming) {
        place = incoming.data(1);
        job.control(1)->send(0, 1, "placed");
      };
      const Receipt full = edge.recv(-1, here, {nullptr, placed});
      full.work->wait();
      CHECK(is_message(*full.message, schema, 5));
      CHECK_EQ(full.message->data(1), place);
      const Receipt empty = edge.recv(-1, here, {nullptr, placed});
      CHECK_THROWS(ErrorKind::kPeerError, empty.work->wait(), "it fell over its own feet");
    }
  });
}

TEST(mail_that_has_begun_has_the_time_of_the_communicator) {
  // The sender says where the message lies, and stops before it lies there; its receiver has all the time in the world.
  const Schema schema = of_sizes({1000, 3000});
  std::string body = encode_schema(schema);
  const ShmJob job(2, 300ms);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 0) {
      const std::uint64_t id = world->next_edge_id(0, 1);
      const Parcel parcel(schema);
      LoanPool pool(world->peer_memory(), 2, parcel.packed.bytes());
      const auto loan = pool.lend(parcel.packed.bytes());
      MessageHeader header = header_of(schema, id);
      header.lent = MessageHeader::Lent{loan->place.segment, loan->place.offset};
      std::string first = forge(header);
      post(*world, first, id)->wait();
      post(*world, body, id)->wait();
      (void)job.control(0)->receive(1, 1, Clock::now() + 20s);
    } else {
      EdgeConfig config;
      config.communicator = world;
      config.peer = 0;
      RecvEdge edge(config, heap());
      OpOptions patient;
      patient.timeout = 24h;
      const Receipt receipt = edge.recv(-1, patient);
      bool ended = false;
      try {
        ended = receipt.work->wait_until(Clock::now() + 10s);
      } catch (const Error& error) {
        ended = error.kind() == ErrorKind::kTimedOut;
      }
      CHECK(ended);
      job.control(1)->send(0, 1, "late");
      if (!ended) {
        job.control(1)->abort("it would wait for a day");
      }
    }
  });
}

// A receiver that waits for a message after two that differ in shapes at most is told so, once; what comes then may
// still be another.
TEST(mail_tells_who_waits_what_the_last_ones_were_like) {
  const Schema tiny = of_sizes({100});
  const Schema lent = of_sizes({1000, 3000});
  const Schema large = of_sizes({10, 5000});
  const std::vector<const Schema*> order{&lent, &lent, &tiny, &tiny, &tiny, &large, &large, &lent, &lent};
  const auto repeats = [&](std::size_t turn) {
    return turn >= 2 && order[turn - 1]->tensors.size() == order[turn - 2]->tensors.size();
  };
  const ShmJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    EdgeConfig config;
    config.communicator = world;
    config.peer = 1 - rank;
    if (rank == 0) {
      SendEdge edge(config, heap());
      for (std::size_t turn = 0; turn < order.size(); ++turn) {
        if (repeats(turn)) {
          (void)job.control(0)->receive(1, 1, Clock::now() + 20s);  // it waits already
        }
        send(edge, *order[turn], static_cast<unsigned>(turn))->wait();
      }
    } else {
      RecvEdge edge(config, heap());
      OpOptions here;
      here.inline_when_idle = true;
      for (std::size_t turn = 0; turn < order.size(); ++turn) {
        std::vector<Schema> told;
        const auto idle = [&](const KnownPtr& known) {
          told.push_back(known->schema);
          job.control(1)->send(0, 1, "waiting");
        };
        const Receipt receipt = edge.recv(-1, here, {idle, nullptr});
        receipt.work->wait();
        CHECK(is_message(*receipt.message, *order[turn], static_cast<unsigned>(turn)));
        CHECK_EQ(told.size(), repeats(turn) ? 1U : 0U);
        CHECK(told.empty() || told[0] == *order[turn - 1]);
      }
    }
  });
}

TEST(mail_says_so_when_a_header_comes_again) {
  // The header alone: what stood behind it the first time does not come again, and nobody may wait for it.
  const Schema schema = of_sizes({100});
  const std::string body = encode_schema(schema);
  const ShmJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    if (rank == 0) {
      const std::uint64_t id = world->next_edge_id(0, 1);
      const MessageHeader header = header_of(schema, id);
      std::string first = forge(header, header.payload_bytes);
      std::string second = body;
      for (std::string* bytes : {&first, &second, &first}) {
        (void)post(*world, *bytes, id);
      }
      (void)job.control(0)->receive(1, 1, Clock::now() + 20s);
    } else {
      EdgeConfig config;
      config.communicator = world;
      config.peer = 0;
      RecvEdge edge(config, heap());
      const Receipt good = take(edge);
      CHECK_EQ(static_cast<const char*>(good.message->data(0))[99], 'x');
      CHECK_THROWS(ErrorKind::kProtocol, take(edge), "edge 0->1: message #0 was received before");
      job.control(1)->send(0, 1, "seen");
    }
  });
}

TEST(mail_errors_name_the_message_that_waits) {
  // A message is several mails: its header, its schema, and each large tensor.
  const Schema schema = of_sizes({5000, 6000});
  const Schema large = of_sizes({std::int64_t{1} << 24});
  for (const int waits : {0, 1}) {
    const ShmJob job(2);
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      EdgeConfig config;
      config.communicator = world;
      config.peer = 1 - rank;
      std::unique_ptr<SendEdge> to;
      std::unique_ptr<RecvEdge> from;
      WorkPtr work;
      if (rank == 0) {
        to = std::make_unique<SendEdge>(config, heap());
        for (unsigned message = 0; message < 3; ++message) {
          send(*to, schema, message)->wait();
        }
        work = waits == rank ? send(*to, large, 3) : nullptr;
      } else {
        from = std::make_unique<RecvEdge>(config, heap());
        for (unsigned message = 0; message < 3; ++message) {
          CHECK(is_message(*take(*from).message, schema, message));
        }
        work = waits == rank ? from->recv(-1).work : nullptr;
      }
      if (work == nullptr) {
        (void)job.control(rank)->receive(1 - rank, 1, ShmJob::soon());
        job.control(rank)->abort("enough");
        return;
      }
      job.control(rank)->send(1 - rank, 1, "waits");
      const auto error = error_of(*work);
      CHECK(error && error->kind() == ErrorKind::kPeerError);
      CHECK_EQ(error->context().sequence, 3);
      CHECK_EQ(std::string(error->what()).substr(0, 22),
               rank == 0 ? "send #3 on lane world:" : "recv #3 on lane world:");
    });
  }
}

TEST(mail_sends_after_close_are_refused) {
  // Inline, lent, direct, and both: none of them goes by way of the communicator's lane.
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{8}, {100, 200}, {5000}, {100, 200, 5000}}) {
    const Schema schema = of_sizes(sizes);
    const ShmJob job(2);
    run_ranks(2, [&](int rank) {
      const auto world = job.communicator(rank);
      EdgeConfig config;
      config.communicator = world;
      config.peer = 1 - rank;
      if (rank == 0) {
        SendEdge edge(config, heap());
        send(edge, schema, 0)->wait();
        world->close();
        CHECK_THROWS(ErrorKind::kClosed, send(edge, schema, 1), "send on a closed communicator");
        job.control(0)->send(1, 1, "refused");
      } else {
        RecvEdge edge(config, heap());
        CHECK(is_message(*take(edge).message, schema, 0));
        (void)job.control(1)->receive(0, 1, Clock::now() + 20s);
        const Receipt nothing = edge.recv(-1);
        CHECK(!nothing.work->wait_until(Clock::now() + 30ms));
      }
    });
  }
}

TEST(mail_larger_messages_than_the_edge_takes_are_refused_on_both_ends) {
  const ShmJob job(2);
  run_ranks(2, [&](int rank) {
    const auto world = job.communicator(rank);
    EdgeConfig config;
    config.communicator = world;
    config.peer = 1 - rank;
    if (rank == 0) {
      config.max_bytes = 1000;
      SendEdge careful(config, heap());
      CHECK_THROWS(ErrorKind::kInvalidArgument, send(careful, of_sizes({2000}), 0),
                   "edge 0->1, message #0: this message has 2048 bytes as it travels, and this rank's end takes up to "
                   "max_bytes=1000");
      config.max_bytes = 1 << 20;
      SendEdge edge(config, heap());
      (void)send(edge, of_sizes({2000}), 0);
      (void)job.control(0)->receive(1, 1, Clock::now() + 20s);
    } else {
      config.max_bytes = 1000;
      const auto allocator = heap();
      RecvEdge other(config, allocator);
      RecvEdge edge(config, allocator);
      CHECK_THROWS(ErrorKind::kProtocol, take(edge), "end takes up to max_bytes=1000");
      CHECK(allocator->allocations.load() <= 1);  // the schema
      job.control(1)->send(0, 1, "seen");
    }
  });
}

TEST(loans_come_back_by_their_flag) {
  const ShmJob job(1);
  const auto world = job.communicator(0);
  const auto memory = world->peer_memory();
  LoanPool pool(memory, 2, 0);
  CHECK_EQ(pool.bytes(), 0);
  const auto first = pool.lend(100);
  const auto second = pool.lend(100);
  CHECK(first && second && first->payload != second->payload);
  CHECK(!pool.lend(100).has_value());
  LoanPool::take_back(*first);
  const auto again = pool.lend(60);  // a block that is large enough
  CHECK(again && again->payload == first->payload);
  LoanPool::take_back(*second);
  const auto larger = pool.lend(5000);  // in place of the free one
  CHECK(larger.has_value());
  CHECK(!pool.lend(1).has_value());
  CHECK_EQ(pool.bytes(), 164 + 5064);
}

TEST(loans_are_looked_for_until_their_receiver_has_them) {
  const Schema schema = of_sizes({1000, 1000});
  run_pair(
      [&](Communicator& world, SendEdge& edge) {
        CHECK(!edge.is_under_way());
        const WorkPtr work = send(edge, schema, 0);
        work->wait();
        CHECK(edge.is_under_way());  // its Work has ended, and without this process nobody finds the block
        world.control().send(1, 1, "sent");
        (void)world.control().receive(1, 1, Clock::now() + 20s);
        CHECK(!edge.is_under_way());  // though the receiver still has it
        world.control().send(1, 1, "looked");
      },
      [&](Communicator& world, RecvEdge& edge, HeapAllocator&) {
        (void)world.control().receive(0, 1, Clock::now() + 20s);
        const Receipt receipt = take(edge);
        world.control().send(0, 1, "taken");
        (void)world.control().receive(0, 1, Clock::now() + 20s);
        CHECK(is_message(*receipt.message, schema, 0));
      });
}

// Lends `bytes` and gets them back, and says where they lay.
const char* lend_once(LoanPool& pool, std::size_t bytes) {
  const auto loan = pool.lend(bytes);
  CHECK(loan.has_value());
  LoanPool::take_back(*loan);
  return loan->payload;
}

TEST(loans_of_small_blocks_take_turns) {
  const ShmJob job(1);
  const auto memory = job.communicator(0)->peer_memory();
  LoanPool pool(memory, 4, 0);
  const char* const first = lend_once(pool, 100);
  const char* const second = lend_once(pool, 100);
  CHECK(first != second);
  for (int i = 0; i < 3; ++i) {
    CHECK(lend_once(pool, 100) == first);
    CHECK(lend_once(pool, 100) == second);
  }
  CHECK_EQ(pool.bytes(), 2 * 164);  // two of four are enough
  LoanPool only(memory, 1, 0);
  CHECK(lend_once(only, 100) == lend_once(only, 100));
}

TEST(loans_of_large_blocks_take_one_where_one_is_enough) {
  const ShmJob job(1);
  LoanPool pool(job.communicator(0)->peer_memory(), 4, 0);
  CHECK(lend_once(pool, LoanPool::kCached + 1) == lend_once(pool, LoanPool::kCached + 1));
  CHECK_EQ(pool.bytes(), 64 + LoanPool::kCached + 1);
}

TEST(loans_are_made_beforehand_when_their_size_is_known) {
  const ShmJob job(1);
  const auto world = job.communicator(0);
  LoanPool pool(world->peer_memory(), 3, 1000);
  CHECK_EQ(pool.bytes(), 3 * 1064);
  for (int i = 0; i < 3; ++i) {
    CHECK(pool.lend(1000).has_value());
  }
  CHECK_EQ(pool.bytes(), 3 * 1064);
}

TEST(loans_that_are_out_at_the_end_are_not_given_to_others) {
  const ShmJob job(1);
  const auto world = job.communicator(0);
  const char* lent = nullptr;
  {
    LoanPool pool(world->peer_memory(), 1, 0);
    lent = pool.lend(1000)->payload;
  }
  std::vector<Buffer> others;
  for (int i = 0; i < 100; ++i) {
    others.push_back(world->allocate(1064));
    const auto* begin = static_cast<const char*>(others.back().view.data);
    CHECK(lent + 1000 <= begin || begin + 1064 <= lent - 64);
  }
}
