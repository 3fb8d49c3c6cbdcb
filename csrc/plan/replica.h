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

// Index order breaks ties of the clock: messages by direction, link and microbatch, then the loss, tied reductions,
// compute.
class Replica {
 public:
  // `spec` must be compilable (compile_spec.h) and outlive this.
  explicit Replica(const CompileSpec& spec);

  // All tasks by simulated ready time. Throws kDeadlock when no order satisfies the compute order and the
  // slots.
  [[nodiscard]] ReadyOrder order() const;

  // One per task. Participants are pipeline ranks here; those of shared tasks and the communicators are left out.
  [[nodiscard]] const std::vector<Operation>& operations() const noexcept { return operations_; }
  // Between tasks.
  [[nodiscard]] const std::vector<Dependency>& data() const noexcept { return data_; }
  [[nodiscard]] int loss() const noexcept { return loss_; }
  [[nodiscard]] double seconds(int task) const { return tasks_[task].seconds; }
  // The last task that adds to the gradients of `stage`; -1 when none does.
  [[nodiscard]] int last_backward(int stage) const { return last_backward_[stage]; }
  // The computation of a pipeline rank, in order.
  [[nodiscard]] const std::vector<int>& compute_of(int rank) const { return compute_of_[rank]; }

 private:
  int add(Operation op, double seconds);
  void add_messages(Payload payload);
  void add_compute();
  void connect_stages();
  void connect_loss();
  void connect_ties();
  void reads(int after, int before);
  void hand_over(int producer, int consumer, int message);
  [[nodiscard]] int& compute(OpKind kind, int stage, int microbatch);
  [[nodiscard]] int message(int first, int microbatch) const;

  const CompileSpec& spec_;
  bool has_backward_ = false;
  std::vector<Operation> operations_;
  std::vector<ReadyTask> tasks_;  // parallel to operations_
  std::vector<Arc> arcs_;
  std::vector<Dependency> data_;  // the arcs that carry data
  int num_edges_ = 0;
  std::vector<int> activations_,
      gradients_;  // link -> message of microbatch 0; -1: the link stays on its rank
  // (stage, microbatch) -> task; a backward or an input gradient; -1: there is none.
  std::vector<int> forwards_, backwards_, weights_;
  std::vector<int> last_backward_;            // stage -> task
  std::vector<std::vector<int>> compute_of_;  // pipeline rank -> tasks
  int loss_ = -1;
  int first_tie_ = -1;  // the others follow it
};

}  // namespace hpcomm::plan
