// Runs of neighbouring entries are packed together; a bucket that lies in place is only summed.
#include "engine/bucket_reduction.h"

#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "pack/reduce.h"

namespace hpcomm {

namespace {

struct Run {
  std::size_t begin = 0;
  std::size_t end = 0;
};

// The entries for which `in_place` is as asked, neighbours together.
std::vector<Run> runs(const std::vector<Contribution>& entries, bool in_place) {
  std::vector<Run> found;
  for (std::size_t e = 0; e < entries.size(); ++e) {
    if (entries[e].in_place != in_place) {
      continue;
    }
    if (found.empty() || found.back().end != e) {
      found.push_back({e, e});
    }
    found.back().end = e + 1;
  }
  return found;
}

std::size_t run_bytes(const Layout& layout, const Run& run) {
  const std::size_t end = run.end < layout.entries().size() ? layout.entries()[run.end].offset : layout.bytes();
  return end - layout.entries()[run.begin].offset;
}

// The layout of a run by itself: entries start on cache lines, so they keep their distances.
Layout part(const Layout& layout, const Run& run) {
  std::vector<TensorSize> sizes;
  std::optional<DType> wire;
  for (std::size_t e = run.begin; e < run.end; ++e) {
    const Layout::Entry& entry = layout.entries()[e];
    sizes.push_back({entry.count, entry.dtype});
    if (entry.wire != entry.dtype) {
      wire = entry.wire;
    }
  }
  return Layout(sizes, wire);
}

class Issue {
 public:
  Issue(Communicator& communicator, const BucketReduction& reduction, std::uint64_t number,
        std::vector<RunCheck>* checks)
      : communicator_(communicator),
        reduction_(reduction),
        number_(number),
        layout_(reduction.bucket->layout),
        checks_(checks),
        casts_(!layout_.entries().empty() && layout_.entries().front().wire != layout_.entries().front().dtype) {
    if (reduction.factor) {
      scale_ = *reduction.factor;
      scales_ = true;
      return;
    }
    // A cast loses range, so what is cast is scaled before. Otherwise the average costs nothing where the transport
    // forms it, and as little in the pack kernel, through which nearly all gradients go. The choice is the same on all
    // ranks: it does not look at where this one has its gradients.
    scales_ = communicator.size() > 1 && (casts_ || !communicator.averages_well() || communicator.sums_faster());
    if (scales_) {
      scale_.constant = 1.0 / communicator.size();
    }
  }

  // Before the lane waits for the caller's stream, where the numbers are written: an overflow that a late INT32_MAX
  // wipes out would be lost.
  void make_checks() {
    for (const bool in_place : {false, true}) {
      for (const Run& run : runs(reduction_.entries, in_place)) {
        if (reduction_.make_check) {
          checks_->push_back({run.begin, reduction_.make_check()});
        }
      }
    }
  }

  void gather() {
    const Keepalive read = both(reduction_.held, reduction_.sources);
    for (const Run& run : runs(reduction_.entries, false)) {
      std::vector<const void*> sources;
      for (std::size_t e = run.begin; e < run.end; ++e) {
        sources.push_back(reduction_.entries[e].source);
      }
      const bool whole = run.begin == 0 && run.end == layout_.entries().size();
      pack(stream(), whole ? layout_ : part(layout_, run), sources, memory_of(run), scale_, read, check_of(run),
           communicator_.size() > 1 ? Reader::kOthers : Reader::kThisCore);
    }
    for (const Run& run : runs(reduction_.entries, true)) {
      if (scale_.is_one() && !reduction_.make_check) {
        continue;
      }
      std::vector<BufferView> views;
      for (std::size_t e = run.begin; e < run.end; ++e) {
        const Layout::Entry& entry = layout_.entries()[e];
        views.push_back({static_cast<char*>(reduction_.memory.data) + entry.offset, entry.wire_bytes(), entry.count,
                         entry.wire, reduction_.memory.device});
      }
      scale(stream(), views, scale_, reduction_.held, check_of(run));
    }
  }

  // `behind`: null, or issued as part of it.
  [[nodiscard]] WorkPtr reduce(const std::function<void()>* behind) {
    if (communicator_.size() == 1) {
      return nullptr;
    }
    OpOptions options;
    options.keepalive = reduction_.held;
    options.inline_when_idle = reduction_.in_caller;
    options.poll = reduction_.poll;
    options.behind = behind;
    options.reducer_id = reduction_.reducer_id;
    options.bucket = static_cast<std::uint16_t>(number_);
    const DType dtype = reduction_.bucket->dtype;
    BufferView view = reduction_.memory;
    view.dtype = dtype;
    view.bytes = layout_.bytes();
    view.count = reduction_.bucket->count();
    if (layout_.is_plain() && reduction_.factor) {
      view.bytes = layout_.entries().front().wire_bytes();
      view.count = layout_.entries().front().count;
    }
    if (reduction_.scatter) {
      HPCOMM_REQUIRE(!casts_, "gradients that are cast cannot be scattered");
      view.bytes = reduction_.memory.bytes;
      view.count = view.bytes / size_of(dtype);
      const auto ranks = static_cast<std::size_t>(communicator_.size());
      BufferView own = view;
      own.bytes /= ranks;
      own.count /= ranks;
      own.data = static_cast<char*>(view.data) + static_cast<std::size_t>(communicator_.rank()) * own.bytes;
      return communicator_.reduce_scatter(own, view, op(), options);
    }
    return communicator_.all_reduce(view, op(), options);
  }

  void scatter() {
    std::vector<void*> targets;
    bool any = false;
    for (const Contribution& entry : reduction_.entries) {
      targets.push_back(entry.target);
      any = any || entry.target != nullptr;
    }
    if (any) {
      unpack(stream(), layout_, reduction_.memory, targets, {}, reduction_.held);
    }
  }

 private:
  [[nodiscard]] ReduceOp op() const { return scales_ ? ReduceOp::kSum : ReduceOp::kAverage; }
  [[nodiscard]] Stream& stream() const { return communicator_.stream(); }

  [[nodiscard]] BufferView memory_of(const Run& run) const {
    const std::size_t bytes = run_bytes(layout_, run);
    return {static_cast<char*>(reduction_.memory.data) + layout_.entries()[run.begin].offset, bytes, bytes,
            DType::kUInt8, reduction_.memory.device};
  }

  [[nodiscard]] FiniteCheck check_of(const Run& run) const {
    if (reduction_.make_check) {
      for (const RunCheck& check : *checks_) {
        if (check.first_entry == run.begin) {
          return {check.first_bad};
        }
      }
    }
    return {};
  }

  Communicator& communicator_;
  const BucketReduction& reduction_;
  const std::uint64_t number_;  // of the bucket
  const Layout& layout_;
  std::vector<RunCheck>* checks_;
  bool casts_;
  bool scales_ = false;
  Scale scale_;
};

}  // namespace

WorkPtr issue(Communicator& communicator, const BucketReduction& reduction, std::uint64_t number,
              std::vector<RunCheck>* checks) {
  HPCOMM_ASSERT(reduction.entries.size() == reduction.bucket->layout.entries().size(), "one contribution per entry");
  HPCOMM_ASSERT(!reduction.make_check || checks != nullptr, "checks need a place");
  Issue steps(communicator, reduction, number, checks);
  steps.make_checks();
  // The gradients are the backward's, which may still run.
  communicator.stream().wait(communicator.compute()->record());
  const auto may_run_here = [&] { return reduction.in_caller && communicator.stream().idle(); };
  const auto tell = [&](const std::function<void()>& listener) {
    if (listener && may_run_here()) {
      listener();
    } else if (listener) {
      communicator.stream().enqueue(listener);
    }
  };
  const std::function<void()> behind = [&] {
    tell(reduction.reduced);
    steps.scatter();
    tell(reduction.ended);
  };
  tell(reduction.begun);
  steps.gather();
  tell(reduction.packed);
  if (communicator.take_behind() && communicator.size() > 1) {
    return steps.reduce(&behind);
  }
  const WorkPtr reduced = steps.reduce(nullptr);
  behind();
  if (may_run_here() && reduced != nullptr && reduced->done()) {
    return reduced;  // with all that was queued before and behind it
  }
  return communicator.follow(reduced, communicator.context("reduce", -1, number), reduction.held);
}

}  // namespace hpcomm
