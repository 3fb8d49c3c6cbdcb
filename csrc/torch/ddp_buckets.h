// The gradients of a DistributedDataParallel in the memory of its buckets: which lie there, which are packed into it,
// and who gets the averages. What DdpReducer issues and waits for; its mutex is held wherever this is used.
//
// In a reduction each bucket goes begin(), carry() of its gradients where that is worthwhile, complete(), hand_out(),
// let_go(). begin() is possible from everywhere, once nothing runs on the lane any more.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "engine/bucket_reduction.h"
#include "plan/bucket_plan.h"
#include "torch/ddp_options.h"
#include "torch/ddp_parameters.h"
#include "torch/gradient_hooks.h"
#include "torch/used_parameters.h"

namespace hpcomm {

class DdpBuckets {
 public:
  // Gradients that were packed, copied back and reduced in place, and buckets that got memory; up to now.
  struct Counts {
    std::uint64_t packed = 0;
    std::uint64_t copied_back = 0;
    std::uint64_t in_place = 0;
    std::uint64_t allocated = 0;
  };

  // What a parameter has had of this rank's backward when its bucket is complete.
  enum class Reached : std::uint8_t {
    kNoBackward,    // its bucket is reduced by hand
    kNot,           // what gradient it has stays as it is where no other rank has one
    kYes,           // perhaps with no gradient
    kWithGradient,  // which must not be gone since
  };

  // `params` and `hooks` live longer than this.
  DdpBuckets(std::shared_ptr<Communicator> communicator, const DdpParameters& params, const GradientHooks& hooks,
             const DdpOptions& options, BucketPlan plan);

  [[nodiscard]] std::size_t size() const noexcept { return buckets_.size(); }
  [[nodiscard]] const BucketPlan& plan() const noexcept { return plan_; }
  // Parameters of a bucket, in the order of its entries.
  [[nodiscard]] const std::vector<int>& params(std::size_t bucket) const { return plan_.buckets[bucket].params; }
  [[nodiscard]] std::size_t bucket_of(std::size_t param) const { return places_[param].bucket; }
  // Its memory as bytes, padding included; undefined before it first had some.
  [[nodiscard]] const at::Tensor& flat(std::size_t bucket) const { return buckets_[bucket].flat; }
  // Whether this rank has brought a gradient to what it completed last.
  [[nodiscard]] bool has_gradient(std::size_t bucket, std::size_t entry) const {
    return buckets_[bucket].entries[entry].fate != Fate::kMissing;
  }
  [[nodiscard]] const Counts& counts() const noexcept { return counts_; }

  // Other buckets, of which none is in a reduction. Gradients that lie in the old ones move along.
  void replan(BucketPlan plan);

  void begin(std::size_t bucket);
  // Packs one new gradient as soon as it is there, `incoming` as of its hook: it is still in the caches, and autograd
  // makes the next one in the memory that it leaves. What cannot be packed like this waits for its bucket.
  void carry(int param, const at::Tensor& incoming);
  // All its gradients are there: what is to be reduced, with `reached` by entry. The results lie where .grad says, or
  // hand_out() says it. Throws where a gradient is not what it should be.
  [[nodiscard]] BucketReduction complete(std::size_t bucket, const at::Tensor& incoming,
                                         const std::vector<Reached>& reached);
  // The reduction has ended, and .grad of all parameters is the average, or with `shard` nothing. `used`: by entry, or
  // by parameter.
  void hand_out(std::size_t bucket, RankCounts* used, bool by_entry);
  // Of gradients whose reduction is over. `here`: whoever takes their memory next comes behind it, so that it is free
  // at once. A lane on a GPU would keep it until it records again, half a backward later.
  void let_go(std::size_t bucket, bool here);

 private:
  using Storages = std::vector<c10::Storage>;

  // What becomes of a gradient once its bucket is reduced.
  enum class Fate : std::uint8_t {
    kMissing,     // there was none: .grad becomes the view, if another rank had one
    kInBucket,    // .grad is the view already
    kCopiedBack,  // .grad is somebody else's memory, into which the lane copies the result
    kStaged,      // the same through a copy that has the strides of the bucket
  };

  // One gradient in a reduction.
  struct Entry {
    bool carried = false;  // carry() has packed it
    Fate fate = Fate::kMissing;
    at::Tensor staged;   // a copy (kStaged), what a missing gradient becomes, or the gradient
    at::Tensor resting;  // a copy where no backward of this rank reached its parameter
  };

  // What a reduction uses to its end. The lane keeps it without looking into it, and may be late to let go.
  struct Held {
    Storages gradients;  // that get a copy of the result
    Keepalive memory;    // not the storage, which is counted to see who else looks at it
  };

  struct Memory {       // of a bucket
    at::Tensor flat;    // as bytes; every .grad in it holds the same storage
    Keepalive owner;    // of the same memory
    bool open = false;  // it is that of this reduction: gradients may be packed
    std::vector<Entry> entries;
    std::shared_ptr<Held> held;
    // Of gradients that are in the bucket once they are packed: the lane's alone, or a step would hold all of them.
    std::weak_ptr<Storages> sources;
  };

  // One gradient while its bucket is completed.
  struct Packing {
    std::size_t bucket;
    std::size_t entry;
    const at::Tensor& incoming;
    Reached reached;
    Storages& held;
    Storages& sources;
  };

  void lay_out(BucketPlan plan);
  void open(std::size_t bucket);
  void allocate(std::size_t bucket);
  void reserve();
  [[nodiscard]] std::size_t byte_size(std::size_t bucket) const;
  [[nodiscard]] std::size_t param_of(std::size_t bucket, std::size_t entry) const;
  [[nodiscard]] bool is_free(std::size_t bucket) const;
  [[nodiscard]] bool lies_in_place(std::size_t bucket, std::size_t entry) const;
  [[nodiscard]] bool may_be_carried(std::size_t param) const;
  void require_reducible(std::size_t param) const;
  [[nodiscard]] Contribution contribute(const Packing& packing);
  [[nodiscard]] Contribution contribute_missing(const Packing& packing);
  [[nodiscard]] Contribution contribute_copy(const Packing& packing, const at::Tensor& source, bool becomes_view);
  [[nodiscard]] void* stage(const Packing& packing);
  void move_into_bucket(at::Tensor& gradient, std::size_t bucket, std::size_t entry) const;
  [[nodiscard]] at::Tensor make_view(std::size_t bucket, std::size_t entry) const;
  void hand_out_one(std::size_t bucket, std::size_t entry, RankCounts* used, std::size_t place);
  void move_kept_gradients(const std::vector<Memory>& old);

  const std::shared_ptr<Communicator> communicator_;
  const DdpParameters& params_;
  const GradientHooks& hooks_;
  const DdpOptions& options_;
  BucketPlan plan_;
  std::vector<BucketPlace> places_;
  std::vector<Memory> buckets_;
  bool reserved_ = false;  // room in the transport's memory for all buckets
  Counts counts_;
};

}  // namespace hpcomm
