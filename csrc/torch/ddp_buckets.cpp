// The memory of buckets: which gradients lie in it, which are packed into it, and who gets the results.
#include "torch/ddp_buckets.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/host_memory.h"
#include "pack/pack.h"
#include "torch/device.h"
#include "torch/tensor.h"

namespace hpcomm {

namespace {

constexpr std::size_t kSmallBytes = std::size_t{64} << 10;

// The strides that AccumulateGrad gives a gradient (torch's "Gradient Layout Contract"): those of its parameter, or of
// a contiguous tensor where the parameter has holes.
std::vector<std::int64_t> strides_of(const at::Tensor& param) {
  if (param.is_non_overlapping_and_dense()) {
    return param.strides().vec();
  }
  std::vector<std::int64_t> strides(static_cast<std::size_t>(param.dim()));
  std::int64_t step = 1;
  for (std::size_t d = strides.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<std::int64_t>(1, param.sizes()[d]);
  }
  return strides;
}

bool has_graph(const at::Tensor& gradient) { return gradient.requires_grad() && !gradient.is_leaf(); }

bool is_laid_out_as(const at::Tensor& gradient, const at::Tensor& param) {
  if (gradient.sizes() != param.sizes() || gradient.is_conj() || gradient.is_neg()) {
    return false;  // its bytes are not its values
  }
  return (gradient.is_contiguous() && param.is_contiguous()) ||  // strides of axes of length one do not matter
         gradient.strides() == at::IntArrayRef(strides_of(param));
}

// Made by this backward, and nobody has seen it: whose memory it is makes no difference. What came into this hook and
// is the gradient now was taken over by autograd, which does so only with what nobody else refers to. `known`
// references to the storage are ours.
bool is_new(const at::Tensor& gradient, const at::Tensor& incoming, std::size_t known) {
  return gradient.use_count() == 1 &&
         ((incoming.defined() && incoming.has_storage() && incoming.is_alias_of(gradient)) ||
          gradient.storage().use_count() == known);
}

at::Tensor make_dense(const at::Tensor& param) {
  return at::empty_strided(param.sizes(), strides_of(param), param.options().requires_grad(false));
}

// A gradient with a graph of its own becomes another one, whose graph divides by the ranks, as torch's reducer does it:
// what is derived from it is then this rank's part of the average. The values are replaced by the average.
at::Tensor divided(const at::Tensor& gradient, int ranks) {
  TORCH_WARN_ONCE("DistributedDataParallel with create_graph=True: gradients are averaged, and what is derived from ",
                  "them is of this rank alone, divided by the number of ranks");
  const at::AutoGradMode with_graph(true);
  return gradient.mul(1.0 / ranks);
}

// Of memory that a hook has made, perhaps on another stream than this one, which has begun to read it: it is not for
// others before.
void keep_until_read(const at::Tensor& made) {
  if (made.is_cuda()) {
    const c10::impl::VirtualGuardImpl streams(made.device().type());
    made.record_stream(streams.getStream(made.device()));
  }
}

// `gradient` as it was, if no rank has used its parameter; false where it is known that one has. `average`, if defined,
// may lie where the gradient lay; undefined: nothing went over it. On a GPU the device decides, for the host would
// wait.
bool put_back(at::Tensor& gradient, const at::Tensor& resting, const at::Tensor& average, RankCounts& used,
              std::size_t place) {
  const bool written = average.defined();
  if (used.tensor().is_cuda() && written) {
    gradient.copy_(at::where(used.any_there(place), average, resting));
    keep_until_read(resting);
    keep_until_read(average);
    return true;
  }
  if (used.any(place)) {
    return false;
  }
  if (written) {
    gradient.copy_(resting);
  }
  return true;
}

}  // namespace

DdpBuckets::DdpBuckets(std::shared_ptr<Communicator> communicator, const DdpParameters& params,
                       const GradientHooks& hooks, const DdpOptions& options, BucketPlan plan)
    : communicator_(std::move(communicator)), params_(params), hooks_(hooks), options_(options) {
  lay_out(std::move(plan));
}

void DdpBuckets::lay_out(BucketPlan plan) {
  plan_ = std::move(plan);
  places_ = places_of(plan_, params_.size());
  buckets_.clear();
  buckets_.resize(plan_.buckets.size());
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    begin(b);
  }
}

void DdpBuckets::replan(BucketPlan plan) {
  const std::vector<Memory> old = std::exchange(buckets_, {});
  lay_out(std::move(plan));
  move_kept_gradients(old);
}

void DdpBuckets::begin(std::size_t bucket) {
  Memory& memory = buckets_[bucket];
  memory.open = false;  // somebody may have kept what the last step left there
  memory.held = nullptr;
  memory.entries.assign(params(bucket).size(), {});
}

std::size_t DdpBuckets::param_of(std::size_t bucket, std::size_t entry) const {
  return static_cast<std::size_t>(params(bucket)[entry]);
}

// Shards are equal parts on cache lines.
std::size_t DdpBuckets::byte_size(std::size_t bucket) const {
  const std::size_t grain = options_.shard ? Layout::kAlignment * static_cast<std::size_t>(communicator_->size()) : 1;
  return round_up(plan_.buckets[bucket].layout.bytes(), grain);
}

// Room for all buckets in one piece, before the first of them: their sizes change once, when the order is learned. In
// pieces of the old sizes the new ones would not fit, and a transport does not give its peers' memory back.
void DdpBuckets::reserve() {
  constexpr std::size_t kPage = 4096;  // on which large blocks begin
  if (std::exchange(reserved_, true) || communicator_->peer_memory() == nullptr) {
    return;
  }
  std::size_t all = 2 * kPage;  // buckets may become two more
  for (std::size_t b = 0; b < size(); ++b) {
    all += byte_size(b) + kPage;
  }
  static_cast<void>(communicator_->allocate(all));
}

void DdpBuckets::allocate(std::size_t bucket) {
  reserve();
  Buffer buffer = communicator_->allocate(byte_size(bucket));
  Memory& memory = buckets_[bucket];
  memory.owner = buffer.owner;
  memory.flat = as_tensor(buffer.view, std::move(buffer.owner));
  memory.flat.zero_();  // padding is summed too; zero once is zero for ever
  ++counts_.allocated;
}

bool DdpBuckets::lies_in_place(std::size_t bucket, std::size_t entry) const {
  const at::Tensor& flat = buckets_[bucket].flat;
  const at::Tensor& gradient = params_[param_of(bucket, entry)].grad();
  const Layout::Entry& place = plan_.buckets[bucket].layout.entries()[entry];
  return gradient.defined() && flat.defined() && place.wire == place.dtype && gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() == flat.storage().unsafeGetStorageImpl() &&
         static_cast<const char*>(gradient.data_ptr()) == static_cast<const char*>(flat.data_ptr()) + place.offset;
}

// Nobody but .grad of its own parameters looks at the memory. What somebody has kept of an earlier step stays as it is,
// and the bucket gets other memory. Gradients that are all in place are meant to change where they are.
bool DdpBuckets::is_free(std::size_t bucket) const {
  const at::Tensor& flat = buckets_[bucket].flat;
  if (!flat.defined()) {
    return false;
  }
  const std::size_t entries = params(bucket).size();
  std::size_t in_place = 0;
  for (std::size_t e = 0; e < entries; ++e) {
    in_place += lies_in_place(bucket, e) ? 1 : 0;
  }
  return in_place == entries || flat.storage().use_count() <= 1 + in_place;
}

void DdpBuckets::open(std::size_t bucket) {
  if (!buckets_[bucket].open && !is_free(bucket)) {
    allocate(bucket);
  }
  buckets_[bucket].open = true;
}

bool DdpBuckets::may_be_carried(std::size_t param) const {
  const at::Tensor& gradient = params_[param].grad();
  const auto [bucket, entry] = places_[param];
  const Layout::Entry& place = plan_.buckets[bucket].layout.entries()[entry];
  return gradient.defined() && gradient.layout() == at::kStrided && !gradient.requires_grad() && has_memory(gradient) &&
         gradient.numel() == params_.numel(param) && gradient.device() == params_[param].device() &&
         gradient.scalar_type() == params_[param].scalar_type() && place.wire == place.dtype;
}

void DdpBuckets::carry(int param, const at::Tensor& incoming) {
  const auto number = static_cast<std::size_t>(param);
  if (!may_be_carried(number)) {
    return;
  }
  const auto [bucket, entry] = places_[number];
  at::Tensor& gradient = params_[number].mutable_grad();
  open(bucket);
  if (lies_in_place(bucket, entry) || !is_laid_out_as(gradient, params_[number]) || hooks_.is_shared(number) ||
      !is_new(gradient, incoming, 1)) {
    return;
  }
  const std::size_t nbytes = gradient.nbytes();
  Memory& memory = buckets_[bucket];
  char* const target =
      static_cast<char*>(memory.flat.data_ptr()) + plan_.buckets[bucket].layout.entries()[entry].offset;
  if (nbytes <= kSmallBytes) {
    std::memcpy(target, gradient.data_ptr(), nbytes);  // a kernel takes longer to start: only host lanes lack a core
  } else {
    copy(*communicator_->compute(), {{gradient.data_ptr(), target, nbytes, DType::kUInt8, DType::kUInt8}});
  }
  move_into_bucket(gradient, bucket, entry);
  memory.entries[entry].carried = true;
  ++counts_.packed;
}

// `gradient` is new and has its values in the bucket already. Its tensor is kept: to make another one takes longer than
// all else that a hook does.
void DdpBuckets::move_into_bucket(at::Tensor& gradient, std::size_t bucket, std::size_t entry) const {
  at::TensorImpl* const impl = gradient.unsafeGetTensorImpl();
  const at::Tensor& param = params_[param_of(bucket, entry)];
  const at::Tensor& flat = buckets_[bucket].flat;
  if (impl->key_set() != flat.key_set() || impl->autograd_meta() != nullptr || gradient.strides() != param.strides()) {
    gradient = make_view(bucket, entry);
    return;
  }
  impl->set_allow_tensor_metadata_change(true);         // autograd has detached it
  impl->set_version_counter(c10::VariableVersion(0u));  // shared with what it was detached from
  impl->set_storage_keep_dtype(flat.storage());
  impl->set_storage_offset(static_cast<std::int64_t>(plan_.buckets[bucket].layout.entries()[entry].offset) /
                           param.element_size());
}

at::Tensor DdpBuckets::make_view(std::size_t bucket, std::size_t entry) const {
  const at::Tensor& param = params_[param_of(bucket, entry)];
  const at::Tensor& flat = buckets_[bucket].flat;
  const Layout::Entry& place = plan_.buckets[bucket].layout.entries()[entry];
  HPCOMM_ASSERT(place.wire == place.dtype, "a view of parameter ", params_.names()[param_of(bucket, entry)]);
  auto view = at::detail::make_tensor<at::TensorImpl>(c10::Storage(flat.storage()), flat.key_set(), param.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(
      static_cast<std::int64_t>(place.offset / static_cast<std::size_t>(param.element_size())));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(param.sizes(), strides_of(param));
  return view;
}

BucketReduction DdpBuckets::complete(std::size_t bucket, const at::Tensor& incoming,
                                     const std::vector<Reached>& reached) {
  open(bucket);
  Memory& memory = buckets_[bucket];
  const auto held = std::make_shared<Held>();
  held->memory = memory.owner;
  memory.held = held;
  for (Entry& entry : memory.entries) {  // a hook may have ended with an error here, and another one comes again
    entry = {entry.carried, Fate::kMissing, {}, {}};
  }
  const auto sources = std::make_shared<Storages>();
  sources->reserve(memory.entries.size());
  BucketReduction reduction;
  reduction.bucket = &plan_.buckets[bucket];
  reduction.memory = {memory.flat.data_ptr(), byte_size(bucket), byte_size(bucket), DType::kUInt8,
                      communicator_->device()};
  reduction.scatter = options_.shard;
  reduction.entries.reserve(memory.entries.size());
  for (std::size_t e = 0; e < memory.entries.size(); ++e) {
    reduction.entries.push_back(contribute({bucket, e, incoming, reached[e], held->gradients, *sources}));
  }
  reduction.held = held;
  reduction.sources = sources;
  memory.sources = sources;
  if (options_.check_finite) {
    reduction.make_check = [options = at::TensorOptions(at::kInt).device(params_.device())] {
      const auto number = std::make_shared<const at::Tensor>(at::full({1}, INT32_MAX, options));
      return std::shared_ptr<std::int32_t>(number, number->data_ptr<std::int32_t>());
    };
  }
  return reduction;
}

void DdpBuckets::require_reducible(std::size_t param) const {
  const at::Tensor& gradient = params_[param].grad();
  HPCOMM_REQUIRE(gradient.layout() != at::kSparse, "the gradient of parameter ", params_.names()[param],
                 " is sparse. Sparse gradients are left to torch's reducer, which has to know of them before: let a "
                 "torch.nn.Embedding(..., sparse=True) hold the parameter, or call torch.nn.functional.embedding() "
                 "with sparse=False");
  HPCOMM_REQUIRE(gradient.device() == params_[param].device() && gradient.layout() == at::kStrided &&
                     gradient.scalar_type() == params_[param].scalar_type() &&
                     gradient.numel() == params_[param].numel(),
                 "the gradient of parameter ", params_.names()[param], " (", c10::toString(gradient.scalar_type()),
                 " on ", gradient.device().str(), ", ", gradient.numel(), " elements) is not what its parameter was ",
                 "when it was wrapped; convert the model before");
}

// A copy of the parameter's size, by way of which its gradient is reduced.
void* DdpBuckets::stage(const Packing& packing) {
  at::Tensor& staged = buckets_[packing.bucket].entries[packing.entry].staged;
  staged = make_dense(params_[param_of(packing.bucket, packing.entry)]);
  packing.held.push_back(staged.storage());
  return staged.data_ptr();
}

Contribution DdpBuckets::contribute_missing(const Packing& packing) {
  HPCOMM_REQUIRE(packing.reached != Reached::kWithGradient, "the gradient of parameter ",
                 params_.names()[param_of(packing.bucket, packing.entry)],
                 " was cleared while its reduction waited for others of its bucket, by a hook of ",
                 "another parameter perhaps; clear gradients behind the backward");
  const Layout::Entry& place = plan_.buckets[packing.bucket].layout.entries()[packing.entry];
  return {nullptr, place.wire != place.dtype ? stage(packing) : nullptr, false};
}

// Of a gradient whose bytes are not its values in the parameter's layout, or are somebody else's too.
Contribution DdpBuckets::contribute_copy(const Packing& packing, const at::Tensor& source, bool becomes_view) {
  const std::size_t number = param_of(packing.bucket, packing.entry);
  Entry& entry = buckets_[packing.bucket].entries[packing.entry];
  const at::NoGradGuard guard;
  if (becomes_view && !options_.shard && !hooks_.is_shared(number)) {
    at::Tensor& gradient = params_[number].mutable_grad();
    const at::Tensor dense = make_dense(params_[number]);
    dense.copy_(gradient);
    packing.sources.push_back(dense.storage());
    entry.fate = Fate::kInBucket;
    gradient = make_view(packing.bucket, packing.entry);
    return {dense.data_ptr(), nullptr, false};
  }
  entry.fate = Fate::kStaged;
  void* const copy = stage(packing);
  entry.staged.copy_(source);
  ++counts_.copied_back;
  return {copy, options_.shard ? nullptr : copy, false};
}

Contribution DdpBuckets::contribute(const Packing& packing) {
  const std::size_t number = param_of(packing.bucket, packing.entry);
  const at::Tensor& param = params_[number];
  Entry& entry = buckets_[packing.bucket].entries[packing.entry];
  at::Tensor& gradient = param.mutable_grad();
  params_.require_size(number);
  if (!gradient.defined()) {
    return contribute_missing(packing);
  }
  require_reducible(number);
  if (packing.reached == Reached::kNot && !options_.shard) {
    const at::NoGradGuard guard;
    entry.resting = at::empty_like(gradient).copy_(gradient);
  }
  if (lies_in_place(packing.bucket, packing.entry) && is_laid_out_as(gradient, param)) {
    entry.fate = Fate::kInBucket;
    counts_.in_place += entry.carried ? 0 : 1;
    return {nullptr, nullptr, true};
  }
  ++counts_.packed;
  at::Tensor given;  // where it becomes another one; else nothing holds it here, or it would not be new
  if (has_graph(gradient) && !options_.shard && !entry.resting.defined()) {
    given = gradient;
    gradient = divided(given, communicator_->size());
  }
  const at::Tensor& source = given.defined() ? given : gradient;
  const Layout::Entry& place = plan_.buckets[packing.bucket].layout.entries()[packing.entry];
  const bool may_become_view = place.wire == place.dtype && !gradient.requires_grad();
  const bool becomes_view = (options_.bucket_views || options_.shard) && may_become_view;
  // A wrapper without memory, as functional collectives return, is copied as torch does it. So is what several wrappers
  // average (one inside another, or a layer that two of them share): the lane of the other would still write what this
  // one reads.
  if (!has_memory(gradient) || !is_laid_out_as(gradient, param) || hooks_.is_shared(number)) {
    return contribute_copy(packing, source, becomes_view);
  }
  packing.sources.push_back(source.storage());
  void* const data = source.data_ptr();
  const bool fresh = is_new(gradient, packing.incoming, 2);
  if (becomes_view || (fresh && may_become_view)) {
    entry.fate = Fate::kInBucket;
    if (fresh) {
      move_into_bucket(gradient, packing.bucket, packing.entry);
    } else {
      gradient = make_view(packing.bucket, packing.entry);
    }
    return {data, nullptr, false};
  }
  packing.held.push_back(gradient.storage());
  entry.staged = gradient;  // if it is cleared meanwhile
  entry.fate = Fate::kCopiedBack;
  ++counts_.copied_back;
  return {data, options_.shard ? nullptr : gradient.data_ptr(), false};
}

void DdpBuckets::hand_out(std::size_t bucket, RankCounts* used, bool by_entry) {
  const at::NoGradGuard guard;
  std::vector<Entry>& entries = buckets_[bucket].entries;
  for (std::size_t e = 0; e < entries.size(); ++e) {
    const std::size_t number = param_of(bucket, e);
    if (!options_.shard) {
      hand_out_one(bucket, e, used, by_entry ? e : number);
    } else if (entries[e].fate != Fate::kMissing) {
      params_[number].mutable_grad().reset();  // whole averages are nowhere
    }
    entries[e].staged.reset();
    entries[e].resting.reset();
  }
}

void DdpBuckets::hand_out_one(std::size_t bucket, std::size_t entry, RankCounts* used, std::size_t place) {
  const at::Tensor& param = params_[param_of(bucket, entry)];
  at::Tensor& gradient = param.mutable_grad();
  auto& [carried, fate, staged, resting] = buckets_[bucket].entries[entry];
  const auto is_used = [used, place] { return used == nullptr || used->any(place); };
  // What no rank has used stays as it is, torch's rule, though an average went over it.
  if (resting.defined()) {
    const auto average = [&] {
      return fate == Fate::kInBucket ? make_view(bucket, entry) : fate == Fate::kCopiedBack ? staged : at::Tensor();
    };
    if (gradient.defined() ? put_back(gradient, resting, average(), *used, place) : !is_used()) {
      return;
    }
  }
  switch (fate) {
    case Fate::kMissing:
      if (param.requires_grad() && is_used()) {
        gradient = staged.defined() ? std::move(staged) : make_view(bucket, entry);
      }
      break;
    case Fate::kInBucket:
      if (!gradient.defined()) {  // cleared meanwhile, or another one in its place
        gradient = make_view(bucket, entry);
      } else if (!lies_in_place(bucket, entry)) {
        gradient.copy_(make_view(bucket, entry));
      }
      break;
    case Fate::kCopiedBack:
      if (!gradient.defined()) {
        gradient = std::move(staged);
      } else if (!gradient.is_same(staged)) {
        gradient.copy_(staged);
        keep_until_read(staged);
      }
      gradient.unsafeGetTensorImpl()->bump_version();
      break;
    case Fate::kStaged:
      if (gradient.defined()) {
        gradient.copy_(staged);
        keep_until_read(staged);
      } else {
        gradient = std::move(staged);
      }
      break;
  }
}

void DdpBuckets::let_go(std::size_t bucket, bool here) {
  const auto held = std::exchange(buckets_[bucket].held, nullptr);
  const auto sources = std::exchange(buckets_[bucket].sources, {}).lock();
  if (here && held != nullptr) {
    held->gradients.clear();
  }
  if (here && sources != nullptr) {
    sources->clear();
  }
}

// A gradient that lies in an old bucket keeps its tensor, which callers may know, and gets memory in a new one.
void DdpBuckets::move_kept_gradients(const std::vector<Memory>& old) {
  const at::NoGradGuard guard;
  for (std::size_t b = 0; b < size(); ++b) {
    for (std::size_t e = 0; e < params(b).size(); ++e) {
      at::Tensor& gradient = params_[param_of(b, e)].mutable_grad();
      const bool is_ours = gradient.defined() && gradient.has_storage() &&
                           std::any_of(old.begin(), old.end(), [&gradient](const Memory& memory) {
                             return memory.flat.defined() && memory.flat.is_alias_of(gradient);
                           });
      if (!is_ours || gradient.requires_grad()) {
        continue;
      }
      if (!buckets_[b].flat.defined()) {
        allocate(b);
      }
      const at::Tensor view = make_view(b, e);
      view.copy_(gradient);
      gradient.set_(view.storage(), view.storage_offset(), view.sizes(), view.strides());
    }
  }
}

}  // namespace hpcomm
