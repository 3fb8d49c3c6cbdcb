// The operations of one replica as a task graph: replicas are alike, so one is enough to find the order.
#pragma once

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "plan/compile.h"
#include "plan/cycle.h"
#include "plan/ready_order.h"

namespace hpcomm::plan {

// Index order breaks ties: messages by direction, link and microbatch, then the loss, then compute.
class Replica {
 public:
  // `spec` must be compilable (compile_spec.h) and outlive this.
  explicit Replica(const CompileSpec& spec);

  // All tasks by simulated ready time. Throws kDeadlock when no order satisfies the compute order and the
  // slots.
  [[nodiscard]] std::vector<int> order() const;

  // One per task. Participants are pipeline ranks here; those of the loss and the communicators are left out.
  [[nodiscard]] const std::vector<Operation>& operations() const noexcept { return operations_; }
  // Between tasks.
  [[nodiscard]] const std::vector<Dependency>& data() const noexcept { return data_; }
  [[nodiscard]] int loss() const noexcept { return loss_; }
  // Is this task the last backward of its stage?
  [[nodiscard]] bool is_last_backward(int task) const;

 private:
  int add(Operation op, double seconds);
  void add_messages(Payload payload);
  void add_compute();
  void connect_stages();
  void connect_loss();
  void reads(int after, int before);
  void hand_over(int producer, int consumer, int message);
  [[nodiscard]] int& compute(OpKind kind, int stage, int microbatch);

  const CompileSpec& spec_;
  std::vector<Operation> operations_;
  std::vector<Task> tasks_;  // parallel to operations_
  std::vector<Arc> arcs_;
  std::vector<Dependency> data_;  // the arcs that carry data
  int num_edges_ = 0;
  std::vector<int> activations_,
      gradients_;                          // link -> message of microbatch 0; -1: the link stays on its rank
  std::vector<int> forwards_, backwards_;  // (stage, microbatch) -> task
  std::vector<int> last_backward_;         // stage -> task
  int loss_ = -1;
};

}  // namespace hpcomm::plan
