// MessageTensors: the tensors of a message over the buffers that it came in, made before or after those are known.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "engine/edge.h"

namespace hpcomm {

class MessageTensors {
 public:
  // Of any message of this schema: tensors without memory, which nobody may read before set_memory().
  MessageTensors(KnownPtr known, Device device);
  // They are the caller's now, who does not let go of them before the calls below.
  [[nodiscard]] std::vector<at::Tensor> release();
  // False when they cannot be those of a message of schema `known`. Else they are from now on: they get its shapes.
  [[nodiscard]] bool become(const KnownPtr& known);
  // Gives them the buffers of `message`, which has the schema that they are made for. Needs no GIL, as become(). One
  // storage per buffer: the slot is used again when the last of its tensors is gone.
  void set_memory(const Incoming& message);

 private:
  void make_storages();
  [[nodiscard]] const c10::Storage& storage_of(Parcel::Area area) const noexcept;
  [[nodiscard]] at::TensorOptions options(const TensorSchema& schema) const;
  [[nodiscard]] c10::Storage storage(std::size_t bytes) const;
  [[nodiscard]] at::Tensor make(std::size_t i) const;

  KnownPtr known_;
  c10::Device device_;
  // Null where the schema has no such part.
  c10::Storage packed_;
  c10::Storage direct_;
  c10::Storage cast_;
  std::vector<at::Tensor> tensors_;  // until they are released: each owner more costs both ends of a count
  std::vector<c10::TensorImpl*> released_;
};

}  // namespace hpcomm
