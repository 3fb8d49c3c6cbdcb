"""The second half of a backward: gradients of weights that are computed later than those of inputs.

Zero-bubble schedules divide a backward (P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2). For
linear, convolution and embedding layers the first half keeps their input and the gradient of their output, and the
second half computes the weight's gradient from them: the same products as autograd's own, in the same order, so the
same bits, and no operation is done twice. All other parameters get their gradients in the first half.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from hpcomm import _C

__all__: list[str] = []


class Deferral:
    """Makes the layers of ``module`` defer, while a list of what is pending is open.

    A layer defers when it runs torch's own forward on a weight that is a leaf, requires a gradient and has no hooks;
    layers inside ``torch.compile`` do not, nor those whose forward somebody has replaced. With several uses in one
    microbatch (a tied weight, a recurrence) their gradients are added up before they reach ``.grad``, as autograd does.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._pending: _C.Deferred | None = None
        compiled = {
            id(inner)
            for outer in module.modules()
            if type(outer).__name__ == "OptimizedModule"  # torch.compile's; its home costs a second to import
            for inner in outer.modules()
        }
        own: set[int] = set()
        for layer in module.modules():
            deferring = _FORWARDS.get(type(layer).forward)
            if deferring is not None and id(layer) not in compiled and _is_unchanged(layer):
                layer.forward = DeferringForward(self, layer, deferring)
                own.update(id(layer._parameters.get(name)) for name in ("weight", "bias"))
        # Parameters whose gradients come with the first half.
        self.others = [p for p in module.parameters() if p.requires_grad and id(p) not in own]

    def open(self, pending: _C.Deferred | None) -> None:
        """Uses of layers, and their backwards, leave their work in ``pending``; None ends that."""
        self._pending = pending


class DeferringForward:
    """The forward of one layer: torch's own unless a list is open. The layer owns it, so its way back is weak."""

    computes_as_torch = True

    def __init__(self, deferral: Deferral, layer: torch.nn.Module, function: Any) -> None:
        self._deferral = deferral
        self._layer = weakref.ref(layer)
        self._function = function

    def __call__(self, input: torch.Tensor) -> Any:  # noqa: A002 - as torch's layers call it
        pending, layer = self._deferral._pending, self._layer()
        assert layer is not None  # it is calling
        if pending is None or not torch.is_grad_enabled() or not _can_defer(layer):
            return type(layer).forward(layer, input)
        # Subclasses see to their layers themselves, and inside vmap and the like autograd is torch.func's.
        if type(input) not in (torch.Tensor, torch.nn.Parameter) or torch._C._functorch.maybe_current_level():
            return type(layer).forward(layer, input)
        return self._function(layer, input, pending)

    def __reduce__(self) -> Any:
        """A copied layer is nobody's stage: no list is ever opened for it."""
        return DeferringForward, (Deferral(torch.nn.Module()), self._layer(), self._function)


def _is_unchanged(layer: torch.nn.Module) -> bool:
    forward = vars(layer).get("forward")  # of an earlier Pipeline, or anybody else's
    inner = getattr(layer, "_conv_forward", None)
    return (forward is None or isinstance(forward, DeferringForward)) and (
        inner is None or getattr(inner, "__func__", None) in _CONVOLUTIONS
    )


def _is_plain(weight: Any) -> bool:
    return (
        type(weight) is torch.nn.Parameter
        and weight.requires_grad
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
    )


def _can_defer(layer: torch.nn.Module) -> bool:
    # Not by attribute: what a parametrization gives is computed for each look, and may draw or count.
    if not _is_plain(layer._parameters.get("weight")):
        return False
    if isinstance(layer, torch.nn.Embedding):
        return not layer.sparse and layer.max_norm is None
    if "bias" not in layer._parameters:
        return False
    bias = layer._parameters["bias"]
    if bias is not None and not (_is_plain(bias) or not bias.requires_grad):
        return False
    return isinstance(layer, torch.nn.Linear) or (layer.padding_mode == "zeros" and not isinstance(layer.padding, str))


def _autocast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """What autocast would make of the arguments of a product."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]


class _Convolution(torch.autograd.Function):
    """Convolutions of any number of dimensions, with zeros as padding."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: Any,
        pending: _C.Deferred,
    ) -> torch.Tensor:
        cast_x, cast_weight, cast_bias = _autocast(x, weight, bias)
        ctx.save_for_backward(cast_x, cast_weight)
        ctx.parameters, ctx.pending = (weight, bias), pending
        ctx.how = (list(layer.stride), list(layer.padding), list(layer.dilation), False, [0], layer.groups)
        output: torch.Tensor = layer._conv_forward(cast_x, cast_weight, cast_bias)
        return output

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, cast_weight = ctx.saved_tensors
        weight, bias = ctx.parameters
        if torch.is_grad_enabled() and cast_weight.dtype != weight.dtype:
            raise RuntimeError(
                "a forward under autocast differentiates a layer twice (create_graph=True), which schedules that "
                "divide backwards cannot do; use another schedule"
            )
        wants_bias = bias is not None and bias.requires_grad
        sizes = [weight.shape[0]] if bias is not None else None
        single = x.dim() == cast_weight.dim() - 1  # one sample, without a batch dimension
        many = x.unsqueeze(0) if single else x
        gradient = dy.unsqueeze(0) if single else dy
        stride, padding, dilation, transposed, _, groups = ctx.how
        arguments = (sizes, stride, padding, dilation, transposed, [0] * len(stride), groups)

        def half(mask: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(gradient, many, cast_weight, *arguments, mask)

        def gradients() -> tuple[torch.Tensor, torch.Tensor | None]:
            _, of_weight, of_bias = half([False, True, wants_bias])
            return of_weight, of_bias if wants_bias else None

        dx = half([True, False, False])[0].view(x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.pending.taking:  # somebody differentiates inside a forward
            return dx, *gradients(), None, None
        ctx.pending.add(weight, bias if wants_bias else None, dy, gradients)
        return dx, None, None, None, None


class _Lookup(torch.autograd.Function):
    """Embeddings."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Any, pending: _C.Deferred) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.weight, ctx.pending = layer, weight, pending
        rows = functional.embedding(x, weight, layer.padding_idx, None, 2.0, layer.scale_grad_by_freq, False)
        # Torch lets nobody change what it knows as a view of a function's in place.
        return torch.ops.aten._unsafe_view(rows, rows.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight, layer = ctx.weight, ctx.layer
        padding = -1 if layer.padding_idx is None else layer.padding_idx

        def gradients() -> tuple[torch.Tensor, torch.Tensor | None]:
            table = torch.ops.aten.embedding_dense_backward(dy, x, weight.shape[0], padding, layer.scale_grad_by_freq)
            return table, None

        if not ctx.pending.taking:
            return None, gradients()[0], None, None
        ctx.pending.add(weight, None, dy, gradients)
        return None, None, None, None


def _linear(layer: Any, x: torch.Tensor, pending: _C.Deferred) -> Any:
    y = pending.linear(x, layer.weight, layer.bias)  # in Python a small backward took 7 % longer
    return torch.nn.Linear.forward(layer, x) if y is None else y


def _convolution(layer: Any, x: torch.Tensor, pending: _C.Deferred) -> Any:
    return _Convolution.apply(x, layer.weight, layer.bias, layer, pending)  # type: ignore[no-untyped-call]


def _lookup(layer: Any, x: torch.Tensor, pending: _C.Deferred) -> Any:
    return _Lookup.apply(x, layer.weight, layer, pending)  # type: ignore[no-untyped-call]


# By torch's own forwards: a layer that overrides its forward computes something else.
_FORWARDS: dict[Any, Any] = {
    torch.nn.Linear.forward: _linear,
    torch.nn.Conv1d.forward: _convolution,
    torch.nn.Conv2d.forward: _convolution,
    torch.nn.Conv3d.forward: _convolution,
    torch.nn.Embedding.forward: _lookup,
}
# What those of convolutions call.
_CONVOLUTIONS = {kind._conv_forward for kind in (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)}
