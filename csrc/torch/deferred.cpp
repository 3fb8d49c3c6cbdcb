// The two halves of a linear layer's backward, and the accumulation of what was put off.
#include "torch/deferred.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <unordered_map>

#include "torch/own_memory.h"

namespace hpcomm {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kChanged =
    "the gradient of a layer's output was changed in place before the second half of the backward read it, by a hook "
    "perhaps; use a schedule that does not divide backwards";

// What a node of the graph knows of the layer beside its saved tensors.
struct Layer : torch::CustomClassHolder {
  Layer(std::shared_ptr<Deferred> list, at::Tensor of_weight, at::Tensor of_bias)
      : deferred(std::move(list)), weight(std::move(of_weight)), bias(std::move(of_bias)) {}
  std::shared_ptr<Deferred> deferred;
  at::Tensor weight;  // the leaf itself: a saved tensor would be a cast copy
  at::Tensor bias;
};

at::Tensor as_autocast_would(const at::Tensor& tensor, c10::DeviceType device) {
  const bool casts = tensor.defined() && at::autocast::is_autocast_enabled(device) && tensor.is_floating_point() &&
                     tensor.scalar_type() != at::kDouble;
  return casts ? tensor.to(at::autocast::get_autocast_dtype(device)) : tensor;
}

class Product : public torch::autograd::Function<Product> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const std::shared_ptr<Deferred>& deferred) {
    const c10::DeviceType device = x.device().type();
    const at::Tensor cast_x = as_autocast_would(x, device);
    const at::Tensor cast_weight = as_autocast_would(weight, device);
    const at::Tensor cast_bias = as_autocast_would(bias.value_or(at::Tensor()), device);
    context->save_for_backward({cast_x, cast_weight});
    context->saved_data["layer"] =
        at::IValue::make_capsule(c10::make_intrusive<Layer>(deferred, weight, bias.value_or(at::Tensor())));
    const at::Tensor y = at::linear(cast_x, cast_weight, cast_bias);
    // A layer behind may change it in place, which torch refuses for a function's output that it knows as a view.
    return y.is_view() ? at::_unsafe_view(y, y.sizes()) : y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& dy = gradients[0];
    if (!dy.defined()) {
      return variable_list(4);
    }
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const auto layer = c10::static_intrusive_pointer_cast<Layer>(context->saved_data["layer"].toCapsule());
    const bool wants_bias = layer->bias.defined() && layer->bias.requires_grad();
    // What is saved is a cast copy then, through which no graph leads.
    TORCH_CHECK(!at::GradMode::is_enabled() || saved[1].scalar_type() == layer->weight.scalar_type(),
                "a forward under autocast differentiates a layer twice (create_graph=True), which schedules that "
                "divide backwards cannot do; use another schedule");
    const at::Tensor rows = dy.reshape({-1, dy.size(-1)});
    const auto of_weight = [rows, x] { return rows.t().mm(x.reshape({-1, x.size(-1)})); };
    variable_list inputs(4);
    if (context->needs_input_grad(0)) {
      inputs[0] = rows.mm(saved[1]).view(x.sizes());
    }
    if (layer->deferred->taking()) {
      layer->deferred->add(layer->weight, wants_bias ? layer->bias : at::Tensor(), dy, [rows, of_weight, wants_bias] {
        return Deferred::Gradients(of_weight(), wants_bias ? rows.sum(0) : at::Tensor());
      });
      return inputs;
    }
    if (context->needs_input_grad(1)) {
      inputs[1] = of_weight();
    }
    if (wants_bias && context->needs_input_grad(2)) {
      inputs[2] = rows.sum(0);
    }
    return inputs;
  }
};

bool is_plain(const at::Tensor& x) {
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                          c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  return x.layout() == at::kStrided && !x.key_set().has_any(kWrapped);
}

// As autograd's AccumulateGrad: in the parameter's dtype and, for a first gradient, its strides.
void accumulate(const at::Tensor& parameter, at::Tensor gradient) {
  if (gradient.scalar_type() != parameter.scalar_type()) {
    gradient = gradient.to(parameter.scalar_type());
  }
  at::Tensor& total = parameter.mutable_grad();
  if (total.defined()) {
    total.add_(gradient);
  } else if (gradient.strides() == parameter.strides()) {
    total = std::move(gradient);
  } else {
    total = at::empty_like(parameter).copy_(gradient);
  }
}

}  // namespace

// With dy itself, whatever compute() holds: a gradient that nobody else holds becomes a parameter's .grad, where there
// is one of its shape, and the next gradient is added to it in place. For a view of it: protect().
void Deferred::add(at::Tensor weight, at::Tensor bias, const at::Tensor& dy, std::function<Gradients()> compute) {
  const std::lock_guard lock(mutex_);
  uses_.push_back({std::move(weight), std::move(bias), dy, dy._version(), std::move(compute)});
}

bool Deferred::taking() const noexcept {
  const auto* const asked_for = torch::autograd::get_current_graph_task_exec_info();
  return taking_.load(std::memory_order_relaxed) && (asked_for == nullptr || asked_for->empty());
}

void Deferred::protect(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> kept;
  {
    const std::lock_guard lock(mutex_);
    for (const Use& use : uses_) {
      kept.push_back(use.dy);
    }
  }
  own_gradients(parameters, kept);
}

std::size_t Deferred::size() const {
  const std::lock_guard lock(mutex_);
  return uses_.size();
}

std::optional<at::Tensor> Deferred::linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!is_plain(x)) {
    return std::nullopt;
  }
  return Product::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt, shared_from_this());
}

void Deferred::compute(const std::function<void(const at::Tensor&)>& done) {
  const at::NoGradGuard no_graph;
  std::vector<Use> uses;
  {
    const std::lock_guard lock(mutex_);
    uses.swap(uses_);
  }
  std::unordered_map<const at::TensorImpl*, int> left;
  for (const Use& use : uses) {
    for (const at::Tensor* parameter : {&use.weight, &use.bias}) {
      if (parameter->defined()) {
        ++left[parameter->unsafeGetTensorImpl()];
      }
    }
  }
  std::unordered_map<const at::TensorImpl*, at::Tensor> sums;
  const auto give = [&](const at::Tensor& parameter, const at::Tensor& gradient) {
    if (!parameter.defined()) {
      return;
    }
    const at::TensorImpl* key = parameter.unsafeGetTensorImpl();
    at::Tensor& sum = sums[key];
    if (gradient.defined()) {
      sum = sum.defined() ? sum + gradient : gradient;
    }
    if (--left[key] > 0) {
      return;
    }
    if (sum.defined()) {
      accumulate(parameter, std::exchange(sum, {}));
    }
    if (done) {
      done(parameter);
    }
  };
  for (Use& use : uses) {
    TORCH_CHECK(use.dy._version() == use.version, kChanged);
    use.dy.reset();
    const auto [of_weight, of_bias] = std::exchange(use.compute, nullptr)();  // its operands are free from here on
    give(use.weight, of_weight);
    give(use.bias, of_bias);
  }
}

}  // namespace hpcomm
