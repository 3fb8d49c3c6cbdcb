// Submitting work to a stream, and the rules of graph capture that submitting and querying are under.
#include <algorithm>
#include <random>
#include <set>
#include <utility>

#include "native/fake/cuda/machine.h"

// What a graph, its executables and their launches under way have in common.
struct GraphBody {
  std::vector<fake_cuda::GraphNode> nodes;
  std::vector<std::shared_ptr<const void>> objects;  // of users
};

// A captured graph, or one that is being captured; and one that can be launched.
struct CUgraph_st {
  std::shared_ptr<GraphBody> body = std::make_shared<GraphBody>();
};
struct CUgraphExec_st {
  std::shared_ptr<const GraphBody> body;
  std::atomic<unsigned> launches{0};
};

namespace fake_cuda {

struct Capture {
  CUstream_st* origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  bool invalid = false;
  bool ended = false;
  std::map<CUstream_st*, Order> streams;  // what comes before the next node of each
  unsigned long long id = 0;
  std::unique_ptr<CUgraph_st> graph = std::make_unique<CUgraph_st>();
};

namespace {

struct Captures {
  std::mutex mutex;
  std::vector<std::shared_ptr<Capture>> active;
  std::atomic<int> count{0};  // of `active`: without captures nobody takes the mutex
  unsigned long long ids = 0;
};

Captures& captures() {
  static Captures& the = *new Captures;
  return the;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

std::shared_ptr<Capture> find(const Capture* capture) {
  for (const auto& active : captures().active) {
    if (active.get() == capture) {
      return active;
    }
  }
  return nullptr;
}

void merge(Order& into, const Order& from) {
  for (const auto& [stream, sequence] : from) {
    int& known = into[stream];
    known = std::max(known, sequence);
  }
}

cudaError_t lose(Capture& capture, cudaError_t error) {
  capture.invalid = true;
  return error;
}

cudaError_t add_node(Capture& capture, CUstream_st* stream, std::function<void()> run) {
  if (capture.invalid) {
    return cudaErrorStreamCaptureInvalidated;
  }
  Order& before = capture.streams[stream];
  const int sequence = ++before[stream];
  capture.graph->body->nodes.push_back({std::move(run), stream, sequence, before});
  return cudaSuccess;
}

// The legacy stream waits for blocking streams: using it while one of them is captured is an error.
bool implicitly_captured(const CUstream_st* stream) {
  if (stream->flags == cudaStreamNonBlocking) {
    return false;
  }
  CUstream_st* legacy = nullptr;
  if (resolve(nullptr, legacy) != cudaSuccess || legacy != stream) {
    return false;
  }
  return std::any_of(captures().active.begin(), captures().active.end(), [&](const auto& capture) {
    return capture->origin->device == stream->device && capture->origin->flags != cudaStreamNonBlocking;
  });
}

// The nodes in an order that their edges allow, another one each time: an edge that is missing shows.
std::vector<std::size_t> some_order(const std::vector<GraphNode>& nodes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::size_t> order;
  std::map<const void*, int> ran;
  std::vector<std::size_t> waiting(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    waiting[i] = i;
  }
  while (!waiting.empty()) {
    std::vector<std::size_t> ready;  // places in `waiting`
    for (std::size_t at = 0; at < waiting.size(); ++at) {
      const GraphNode& node = nodes[waiting[at]];
      const bool free = std::all_of(node.before.begin(), node.before.end(), [&](const auto& known) {
        return ran[known.first] >= known.second - (known.first == node.stream ? 1 : 0);
      });
      if (free) {
        ready.push_back(at);
      }
    }
    const std::size_t at = ready[random() % ready.size()];
    const GraphNode& node = nodes[waiting[at]];
    ran[node.stream] = node.sequence;
    order.push_back(waiting[at]);
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return order;
}

}  // namespace

// --- Rules ----------------------------------------------------------------------------------------------------------

cudaError_t unsafe_call() {
  Captures& all = captures();
  if (all.count.load() == 0 || thread_mode == cudaStreamCaptureModeRelaxed) {
    return cudaSuccess;
  }
  const std::lock_guard lock(all.mutex);
  bool refused = false;
  for (const auto& capture : all.active) {
    const bool ours = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool anyones = thread_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (ours || anyones) {
      capture->invalid = true;
      refused = true;
    }
  }
  return refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t query_stream_in_capture(CUstream_st* stream) {
  if (stream->capture.load() != nullptr || captures().count.load() != 0) {
    const std::lock_guard lock(captures().mutex);
    if (const auto capture = find(stream->capture.load())) {
      return lose(*capture, cudaErrorStreamCaptureUnsupported);
    }
    if (implicitly_captured(stream)) {
      return cudaErrorStreamCaptureImplicit;
    }
  }
  return unsafe_call();
}

cudaError_t begin_capture(CUstream_st* stream, cudaStreamCaptureMode mode) {
  CUstream_st* legacy = nullptr;
  if (resolve(nullptr, legacy) == cudaSuccess && legacy == stream) {
    return cudaErrorStreamCaptureUnsupported;
  }
  Captures& all = captures();
  const std::lock_guard lock(all.mutex);
  if (stream->capture.load() != nullptr) {
    return cudaErrorIllegalState;
  }
  auto capture = std::make_shared<Capture>();
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->id = ++all.ids;
  capture->streams[stream] = {};
  stream->capture = capture.get();
  all.active.push_back(std::move(capture));
  ++all.count;
  return cudaSuccess;
}

cudaError_t end_capture(CUstream_st* stream, cudaGraph_t* graph) {
  *graph = nullptr;
  Captures& all = captures();
  const std::lock_guard lock(all.mutex);
  const std::shared_ptr<Capture> capture = find(stream->capture.load());
  if (capture == nullptr) {
    return cudaErrorIllegalState;
  }
  if (capture->origin != stream) {
    return lose(*capture, cudaErrorStreamCaptureUnmatched);
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
    return lose(*capture, cudaErrorStreamCaptureWrongThread);
  }
  std::erase(all.active, capture);
  --all.count;
  capture->ended = true;
  bool joined = true;
  Order& at_end = capture->streams[stream];
  for (auto& [member, order] : capture->streams) {
    member->capture = nullptr;
    joined = joined && at_end[member] >= order[member];
  }
  std::unique_ptr<CUgraph_st> captured = std::move(capture->graph);
  if (capture->invalid) {
    return cudaErrorStreamCaptureInvalidated;
  }
  if (!joined) {
    return cudaErrorStreamCaptureUnjoined;
  }
  *graph = captured.release();
  return cudaSuccess;
}

cudaError_t capture_status(CUstream_st* stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                           cudaGraph_t* graph) {
  *status = cudaStreamCaptureStatusNone;
  if (captures().count.load() == 0) {
    return cudaSuccess;
  }
  const std::lock_guard lock(captures().mutex);
  if (implicitly_captured(stream)) {
    return cudaErrorStreamCaptureImplicit;
  }
  if (const auto capture = find(stream->capture.load())) {
    *status = capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    if (id != nullptr) {
      *id = capture->id;
    }
    if (graph != nullptr) {
      *graph = capture->graph.get();
    }
  }
  return cudaSuccess;
}

cudaError_t exchange_mode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

// --- Work -----------------------------------------------------------------------------------------------------------

cudaError_t submit(CUstream_st* stream, std::function<void()> run) {
  if (captures().count.load() != 0) {
    const std::lock_guard lock(captures().mutex);
    if (const auto capture = find(stream->capture.load())) {
      return add_node(*capture, stream, std::move(run));
    }
    if (implicitly_captured(stream)) {
      return cudaErrorStreamCaptureImplicit;
    }
  }
  stream->push([stream, run = std::move(run)] {
    if (device_error(stream->device) == cudaSuccess) {
      run();
    }
  });
  return cudaSuccess;
}

cudaError_t record(CUstream_st* stream, CUevent_st* event) {
  if (stream->device != event->device) {
    return cudaErrorInvalidResourceHandle;
  }
  if (captures().count.load() != 0) {
    const std::lock_guard lock(captures().mutex);
    if (auto capture = find(stream->capture.load())) {
      if (capture->invalid) {
        return cudaErrorStreamCaptureInvalidated;
      }
      const std::lock_guard event_lock(event->mutex);
      event->recording = nullptr;
      event->order = capture->streams[stream];
      event->captured = std::move(capture);
      return cudaSuccess;
    }
    if (implicitly_captured(stream)) {
      return cudaErrorStreamCaptureImplicit;
    }
  }
  Recording* recording = make_recording();
  {
    const std::lock_guard lock(event->mutex);
    event->recording = recording;
    event->captured = nullptr;
  }
  stream->push([recording] {
    recording->done.store(1, std::memory_order_release);
    wake(recording->done);
  });
  return cudaSuccess;
}

cudaError_t wait_event(CUstream_st* stream, CUevent_st* event) {
  std::shared_ptr<Capture> captured;
  Order order;
  Recording* recording = nullptr;
  {
    const std::lock_guard lock(event->mutex);
    captured = event->captured;
    order = event->order;
    recording = event->recording;
  }
  if (captured != nullptr || captures().count.load() != 0) {
    const std::lock_guard lock(captures().mutex);
    const std::shared_ptr<Capture> own = find(stream->capture.load());
    if (captured != nullptr) {
      if (captured->ended) {
        return own == nullptr ? cudaErrorCapturedEvent : lose(*own, cudaErrorCapturedEvent);
      }
      if (captured->invalid) {
        return cudaErrorStreamCaptureInvalidated;
      }
      if (own != nullptr && own != captured) {
        own->invalid = true;
        return lose(*captured, cudaErrorStreamCaptureMerge);
      }
      stream->capture = captured.get();  // joins: this is how a capture forks
      merge(captured->streams[stream], order);
      return cudaSuccess;
    }
    if (own != nullptr) {
      if (own->invalid) {
        return cudaErrorStreamCaptureInvalidated;
      }
      return recording == nullptr ? cudaSuccess : lose(*own, cudaErrorStreamCaptureIsolation);
    }
  }
  if (recording != nullptr) {
    stream->push([recording] { wait_for(*recording); });
  }
  return cudaSuccess;
}

cudaError_t query_event(CUevent_st* event, bool wait) {
  if (const cudaError_t refused = unsafe_call(); refused != cudaSuccess) {
    count_refused_query();
    return refused;
  }
  Recording* recording = nullptr;
  {
    const std::lock_guard event_lock(event->mutex);
    if (event->captured != nullptr) {
      event->captured->invalid = true;
      count_refused_query();
      return cudaErrorCapturedEvent;
    }
    recording = event->recording;
  }
  if (recording == nullptr || recording->done.load(std::memory_order_acquire) != 0) {
    return cudaSuccess;
  }
  if (!wait) {
    return cudaErrorNotReady;
  }
  wait_for(*recording);
  return device_error(event->device);
}

// --- Graphs ---------------------------------------------------------------------------------------------------------

cudaError_t retain_object(cudaGraph_t graph, std::shared_ptr<const void> object) {
  const std::lock_guard lock(captures().mutex);
  graph->body->objects.push_back(std::move(object));
  return cudaSuccess;
}

cudaError_t instantiate(cudaGraphExec_t* executable, cudaGraph_t graph) {
  if (graph == nullptr) {
    return cudaErrorInvalidValue;
  }
  *executable = new CUgraphExec_st{graph->body};
  return cudaSuccess;
}

cudaError_t launch_graph(cudaGraphExec_t executable, CUstream_st* stream) {
  if (executable == nullptr) {
    return cudaErrorInvalidValue;
  }
  return submit(stream, [body = executable->body, seed = ++executable->launches] {
    for (const std::size_t at : some_order(body->nodes, seed)) {
      body->nodes[at].run();
    }
  });
}

cudaError_t destroy_graph(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t destroy_executable(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

}  // namespace fake_cuda
