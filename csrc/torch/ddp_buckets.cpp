// The memory of buckets: which gradients lie in it, which are packed into it, and who gets the results.
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "pack/pack.h"
#include "torch/ddp_reducer.h"
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

}  // namespace

void DdpReducer::lay_out(BucketPlan plan) {
  plan_ = std::move(plan);
  places_ = places_of(plan_, params_.size());
  slots_.clear();
  slots_.resize(plan_.buckets.size());
  for (std::size_t b = 0; b < slots_.size(); ++b) {
    slots_[b].carried.assign(plan_.buckets[b].params.size(), 0);
  }
}

// Shards are equal parts on cache lines.
std::size_t DdpReducer::memory_bytes(std::size_t index) const {
  const std::size_t bytes = plan_.buckets[index].layout.bytes();
  const std::size_t grain = options_.shard ? Layout::kAlignment * static_cast<std::size_t>(communicator_->size()) : 1;
  return (bytes + grain - 1) / grain * grain;
}

at::Tensor DdpReducer::memory(std::size_t bucket) const {
  std::lock_guard lock(mutex_);
  HPCOMM_REQUIRE(bucket < slots_.size(), "there is no bucket ", bucket, "; the model has ", slots_.size());
  const at::Tensor& flat = slots_[bucket].flat;
  return flat.defined() ? flat.view(scalar_type(plan_.buckets[bucket].dtype)) : flat;
}

// Room for all buckets in one piece, before the first of them: their sizes change once, when the order is learned. In
// pieces of the old sizes the new ones would not fit, and a transport does not give its peers' memory back.
void DdpReducer::reserve() {
  constexpr std::size_t kPage = 4096;  // on which large blocks begin
  if (std::exchange(reserved_, true) || communicator_->peer_memory() == nullptr) {
    return;
  }
  std::size_t bytes = 2 * kPage;  // buckets may become two more
  for (std::size_t b = 0; b < slots_.size(); ++b) {
    bytes += memory_bytes(b) + kPage;
  }
  static_cast<void>(communicator_->allocate(bytes));
}

void DdpReducer::allocate(std::size_t index) {
  reserve();
  Buffer buffer = communicator_->allocate(memory_bytes(index));
  slots_[index].owner = buffer.owner;
  slots_[index].flat = as_tensor(buffer.view, std::move(buffer.owner));
  slots_[index].flat.zero_();  // padding is summed too; zero once is zero for ever
  ++record_.counts().allocated;
}

bool DdpReducer::lies_in_place(std::size_t index, std::size_t entry) const {
  const Slot& slot = slots_[index];
  const Bucket& bucket = plan_.buckets[index];
  const at::Tensor& gradient = params_[static_cast<std::size_t>(bucket.params[entry])].grad();
  const Layout::Entry& place = bucket.layout.entries()[entry];
  return gradient.defined() && slot.flat.defined() && place.wire == place.dtype && gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() == slot.flat.storage().unsafeGetStorageImpl() &&
         static_cast<const char*>(gradient.data_ptr()) == static_cast<const char*>(slot.flat.data_ptr()) + place.offset;
}

// Nobody but .grad of its own parameters looks at the memory. What somebody has kept of an earlier step stays as it is,
// and the bucket gets other memory. Gradients that are all in place are meant to change where they are.
bool DdpReducer::is_free(std::size_t index) const {
  const Slot& slot = slots_[index];
  if (!slot.flat.defined()) {
    return false;
  }
  const std::size_t entries = plan_.buckets[index].params.size();
  std::size_t in_place = 0;
  for (std::size_t e = 0; e < entries; ++e) {
    in_place += lies_in_place(index, e) ? 1 : 0;
  }
  return in_place == entries || slot.flat.storage().use_count() <= 1 + in_place;
}

void DdpReducer::open(std::size_t index) {
  if (!slots_[index].open && !is_free(index)) {
    allocate(index);
  }
  slots_[index].open = true;
}

// Made by this backward, and nobody has seen it: whose memory it is makes no difference. What came into this hook and
// is the gradient now was taken over by autograd, which does so only with what nobody else refers to. `known`
// references to the storage are ours.
bool DdpReducer::is_new(const at::Tensor& gradient, const at::Tensor& incoming, std::size_t known) const {
  return gradient.use_count() == 1 &&
         ((incoming.defined() && incoming.has_storage() && incoming.is_alias_of(gradient)) ||
          gradient.storage().use_count() == known);
}

// Packs one new gradient as soon as it is there: it is still in the caches, and autograd makes the next one in the
// memory that it leaves. What cannot be packed like this waits for its bucket.
void DdpReducer::carry(int param, const at::Tensor& incoming) {
  const auto number = static_cast<std::size_t>(param);
  const auto [index, entry] = places_[number];
  const Layout::Entry& place = plan_.buckets[index].layout.entries()[entry];
  at::Tensor& gradient = params_[number].mutable_grad();
  if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.requires_grad() || !has_memory(gradient) ||
      gradient.numel() != kinds_[number].numel || gradient.device() != params_[number].device() ||
      gradient.scalar_type() != params_[number].scalar_type() || place.wire != place.dtype) {
    return;
  }
  open(index);
  if (lies_in_place(index, entry) || !is_laid_out_as(gradient, params_[number]) || is_shared(number) ||
      !is_new(gradient, incoming, 1)) {
    return;
  }
  const std::size_t bytes = gradient.nbytes();
  char* const target = static_cast<char*>(slots_[index].flat.data_ptr()) + place.offset;
  if (bytes <= kSmallBytes) {
    std::memcpy(target, gradient.data_ptr(), bytes);  // a kernel takes longer to start: only host lanes lack a core
  } else {
    copy(*communicator_->compute(), {{gradient.data_ptr(), target, bytes, DType::kUInt8, DType::kUInt8}});
  }
  move_into_bucket(gradient, index, entry);
  slots_[index].carried[entry] = 1;
  ++record_.counts().packed;
}

// `gradient` is new and has its values in the bucket already. Its tensor is kept: to make another one takes longer than
// all else that a hook does.
void DdpReducer::move_into_bucket(at::Tensor& gradient, std::size_t index, std::size_t entry) const {
  at::TensorImpl* const impl = gradient.unsafeGetTensorImpl();
  const at::Tensor& param = params_[static_cast<std::size_t>(plan_.buckets[index].params[entry])];
  const at::Tensor& flat = slots_[index].flat;
  if (impl->key_set() != flat.key_set() || impl->autograd_meta() != nullptr || gradient.strides() != param.strides()) {
    gradient = make_view(index, entry);
    return;
  }
  impl->set_allow_tensor_metadata_change(true);         // autograd has detached it
  impl->set_version_counter(c10::VariableVersion(0u));  // shared with what it was detached from
  impl->set_storage_keep_dtype(flat.storage());
  impl->set_storage_offset(static_cast<std::int64_t>(plan_.buckets[index].layout.entries()[entry].offset) /
                           param.element_size());
}

at::Tensor DdpReducer::make_view(std::size_t index, std::size_t entry) const {
  const at::Tensor& param = params_[static_cast<std::size_t>(plan_.buckets[index].params[entry])];
  const Layout::Entry& place = plan_.buckets[index].layout.entries()[entry];
  auto view = at::detail::make_tensor<at::TensorImpl>(c10::Storage(slots_[index].flat.storage()),
                                                      slots_[index].flat.key_set(), param.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(
      static_cast<std::int64_t>(place.offset / static_cast<std::size_t>(param.element_size())));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(param.sizes(), strides_of(param));
  return view;
}

// A gradient with a graph of its own becomes another one, whose graph divides by the ranks, as torch's reducer does it:
// what is derived from it is then this rank's part of the average. The values are replaced by the average.
at::Tensor DdpReducer::divided(const at::Tensor& gradient) const {
  TORCH_WARN_ONCE("DistributedDataParallel with create_graph=True: gradients are averaged, and what is derived from ",
                  "them is of this rank alone, divided by the number of ranks");
  const at::AutoGradMode with_graph(true);
  return gradient.mul(1.0 / communicator_->size());
}

Contribution DdpReducer::contribute(std::size_t index, std::size_t entry, const at::Tensor& incoming, Storages& held,
                                    Storages& sources) {
  Slot& slot = slots_[index];
  const Bucket& bucket = plan_.buckets[index];
  const auto number = static_cast<std::size_t>(bucket.params[entry]);
  const at::Tensor& param = params_[number];
  const Layout::Entry& place = bucket.layout.entries()[entry];
  const bool casts = place.wire != place.dtype;
  at::Tensor& gradient = param.mutable_grad();
  const auto staged = [&] {
    slot.staged[entry] = at::empty_strided(param.sizes(), strides_of(param), param.options().requires_grad(false));
    held.push_back(slot.staged[entry].storage());
    return slot.staged[entry].data_ptr();
  };
  require_size(number);
  if (!gradient.defined()) {
    const bool is_of_this_step =
        marked_[number] == kMarkedWithGradient && (!options_.find_unused || used_.is_here(number));
    HPCOMM_REQUIRE(slot.started || !is_of_this_step, "the gradient of parameter ", names_[number],
                   " was cleared while its reduction waited for others of its bucket, by a hook of ",
                   "another parameter perhaps; clear gradients behind the backward");
    slot.fates[entry] = Fate::kMissing;
    return {nullptr, casts ? staged() : nullptr, false};
  }
  HPCOMM_REQUIRE(gradient.layout() != at::kSparse, "the gradient of parameter ", names_[number],
                 " is sparse. Sparse gradients are left to torch's reducer, which has to know of them before: let a "
                 "torch.nn.Embedding(..., sparse=True) hold the parameter, or call torch.nn.functional.embedding() "
                 "with sparse=False");
  HPCOMM_REQUIRE(gradient.device() == param.device() && gradient.layout() == at::kStrided &&
                     gradient.scalar_type() == param.scalar_type() && gradient.numel() == param.numel(),
                 "the gradient of parameter ", names_[number], " (", c10::toString(gradient.scalar_type()), " on ",
                 gradient.device().str(), ", ", gradient.numel(), " elements) is not what its parameter was when it ",
                 "was wrapped; convert the model before");
  if (options_.find_unused && !options_.shard && !slot.started && !used_.is_here(number)) {
    const at::NoGradGuard guard;
    slot.resting[entry] = at::empty_like(gradient).copy_(gradient);
  }
  if (lies_in_place(index, entry) && is_laid_out_as(gradient, param)) {
    slot.fates[entry] = Fate::kInBucket;
    record_.counts().in_place += slot.carried[entry] == 0 ? 1 : 0;
    return {nullptr, nullptr, true};
  }
  ++record_.counts().packed;
  at::Tensor given;  // where it becomes another one; else nothing holds it here, or it would not be new
  if (has_graph(gradient) && !options_.shard && !slot.resting[entry].defined()) {
    given = gradient;
    gradient = divided(given);
  }
  const at::Tensor& source = given.defined() ? given : gradient;
  const bool becomes_view = (options_.bucket_views || options_.shard) && !casts && !gradient.requires_grad();
  // A wrapper without memory, as functional collectives return, is copied as torch does it.
  if (!has_memory(gradient) || !is_laid_out_as(gradient, param) || is_shared(number)) {
    const at::NoGradGuard guard;
    if (becomes_view && !options_.shard && !is_shared(number)) {
      const at::Tensor dense =
          at::empty_strided(param.sizes(), strides_of(param), param.options().requires_grad(false));
      dense.copy_(gradient);
      sources.push_back(dense.storage());
      slot.fates[entry] = Fate::kInBucket;
      gradient = make_view(index, entry);
      return {dense.data_ptr(), nullptr, false};
    }
    slot.fates[entry] = Fate::kStaged;
    void* const copy = staged();
    slot.staged[entry].copy_(source);
    ++record_.counts().copied_back;
    return {copy, options_.shard ? nullptr : copy, false};
  }
  sources.push_back(source.storage());
  void* const data = source.data_ptr();
  const bool fresh = is_new(gradient, incoming, 2);
  if (becomes_view || (fresh && !casts && !gradient.requires_grad())) {
    slot.fates[entry] = Fate::kInBucket;
    if (fresh) {
      move_into_bucket(gradient, index, entry);
    } else {
      gradient = make_view(index, entry);
    }
    return {data, nullptr, false};
  }
  held.push_back(gradient.storage());
  slot.staged[entry] = gradient;  // if it is cleared meanwhile
  slot.fates[entry] = Fate::kCopiedBack;
  ++record_.counts().copied_back;
  return {data, options_.shard ? nullptr : gradient.data_ptr(), false};
}

// Has any rank a gradient for it? On a GPU the host waits for the answer: not to be asked for what this rank knows.
bool DdpReducer::is_used(std::size_t index, std::size_t entry) {
  if (at::Tensor& used = slots_[index].used; used.defined()) {
    used = used.cpu();
    return used.data_ptr<std::int32_t>()[entry] != 0;
  }
  return !options_.find_unused || used_.is_anywhere(static_cast<std::size_t>(plan_.buckets[index].params[entry]));
}

// The gradient as it was, if no rank has used its parameter; false where it is known that one has. On a GPU the device
// decides, for the host would wait.
bool DdpReducer::put_back(std::size_t index, std::size_t entry) {
  Slot& slot = slots_[index];
  const auto number = static_cast<std::size_t>(plan_.buckets[index].params[entry]);
  at::Tensor& gradient = params_[number].mutable_grad();
  const at::Tensor& resting = slot.resting[entry];
  const at::Tensor& counts = slot.used.defined() ? slot.used : used_.on_ranks();
  const bool is_written = slot.fates[entry] != Fate::kStaged;
  if (counts.is_cuda() && is_written) {
    const std::size_t place = slot.used.defined() ? entry : number;
    gradient.copy_(at::where(counts.select(0, static_cast<std::int64_t>(place)) != 0, gradient, resting));
    // Made on the stream of a hook, which may be another: its memory is not for others before this has been read.
    const c10::impl::VirtualGuardImpl streams(gradient.device().type());
    resting.record_stream(streams.getStream(gradient.device()));
    return true;
  }
  if (is_used(index, entry)) {
    return false;
  }
  if (is_written) {
    gradient.copy_(resting);
  }
  return true;
}

void DdpReducer::hand_out(std::size_t index) {
  const Bucket& bucket = plan_.buckets[index];
  Slot& slot = slots_[index];
  const at::NoGradGuard guard;
  for (std::size_t e = 0; e < bucket.params.size(); ++e) {
    const auto number = static_cast<std::size_t>(bucket.params[e]);
    at::Tensor& gradient = params_[number].mutable_grad();
    if (options_.shard) {
      if (slot.fates[e] != Fate::kMissing) {
        gradient.reset();  // whole averages are nowhere
      }
      continue;
    }
    // What no rank has used stays as it is, torch's rule, though an average went over it.
    if (slot.resting[e].defined() && (gradient.defined() ? put_back(index, e) : !is_used(index, e))) {
      continue;
    }
    switch (slot.fates[e]) {
      case Fate::kMissing:
        if (params_[number].requires_grad() && is_used(index, e)) {
          gradient = slot.staged[e].defined() ? std::move(slot.staged[e]) : make_view(index, e);
        }
        break;
      case Fate::kInBucket:
        if (!gradient.defined()) {  // cleared meanwhile, or another one in its place
          gradient = make_view(index, e);
        } else if (!lies_in_place(index, e)) {
          gradient.copy_(make_view(index, e));
        }
        break;
      case Fate::kCopiedBack:
        if (!gradient.defined()) {
          gradient = std::move(slot.staged[e]);
        } else if (!gradient.is_same(slot.staged[e])) {
          gradient.copy_(slot.staged[e]);
        }
        gradient.unsafeGetTensorImpl()->bump_version();
        break;
      case Fate::kStaged:
        if (gradient.defined()) {
          gradient.copy_(slot.staged[e]);
        } else {
          gradient = std::move(slot.staged[e]);
        }
        break;
    }
  }
  slot.staged.clear();
  slot.resting.clear();
}

// A gradient that lies in an old bucket keeps its tensor, which callers may know, and gets memory in a new one.
void DdpReducer::move_kept_gradients(const std::vector<Slot>& old) {
  const at::NoGradGuard guard;
  for (std::size_t b = 0; b < slots_.size(); ++b) {
    for (std::size_t e = 0; e < plan_.buckets[b].params.size(); ++e) {
      at::Tensor& gradient = params_[static_cast<std::size_t>(plan_.buckets[b].params[e])].mutable_grad();
      const bool is_ours = gradient.defined() && gradient.has_storage() &&
                           std::any_of(old.begin(), old.end(), [&gradient](const Slot& slot) {
                             return slot.flat.defined() && slot.flat.is_alias_of(gradient);
                           });
      if (!is_ours || gradient.requires_grad()) {
        continue;
      }
      if (!slots_[b].flat.defined()) {
        allocate(b);
      }
      const at::Tensor view = make_view(b, e);
      view.copy_(gradient);
      gradient.set_(view.storage(), view.storage_offset(), view.sizes(), view.strides());
    }
  }
}

}  // namespace hpcomm
