"""Any model that is a chain of layers, as one: Sequential, list of stages, traced forward, decoder of known shape.

A forward is never guessed from the order in which modules were registered: torch.fx proves it, or the decoder's type is
one whose forward is known.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.chain import Chain, Passed, Piece, Section, keywords_of

__all__: list[str] = []

Model = torch.nn.Module | Sequence[torch.nn.Module]

_ADVICE = "write it as an nn.Sequential, or as a hpcomm.Chain where layers take more than the output before them"
_IN_ORDER = (torch.nn.Sequential.forward, Chain.forward)
# Decoders of Hugging Face's transformers that compute embed -> layers -> norm -> head and nothing between.
_DECODERS = ("llama", "mistral", "qwen2", "qwen3")


def as_chain(model: Model) -> torch.nn.Module:
    """``model`` itself where it is an ``nn.Sequential``, a :class:`Section` that shares its modules otherwise.

    Raises:
        InvalidArgument: it is no chain; the message says where that shows. Or it has hooks of its own.
    """
    if isinstance(model, torch.nn.Module):
        _require_no_hooks(model)
    runs_in_order = isinstance(model, torch.nn.Sequential) and type(model).forward in _IN_ORDER
    if isinstance(model, torch.nn.Module) and (runs_in_order or isinstance(model, Section)):
        return model
    if type(model).__module__.startswith("torch._dynamo"):  # not imported for a look: that takes a second
        raise InvalidArgument(
            "Pipeline: the model is what torch.compile() made of a whole one, which cannot be cut; compile its layers, "
            "by layer.compile() or torch.compile(layer)"
        )
    if not isinstance(model, torch.nn.Module):
        stages = list(model)
        if not stages or not all(isinstance(stage, torch.nn.Module) for stage in stages):
            raise InvalidArgument("Pipeline: a list of stages holds one nn.Module per stage, all of them on every rank")
        return torch.nn.Sequential(*stages)
    if _is_decoder(model):
        return _decoder(model)
    return _traced(model)


def _require_no_hooks(model: torch.nn.Module) -> None:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(model, kind, None) for kind in kinds):
        raise InvalidArgument(
            f"Pipeline: there is a hook on the {type(model).__name__} itself, which is never called: its layers are, "
            "one by one; register the hook on a layer"
        )


def split_of(model: Model, split_at: Sequence[str | int] | None) -> Sequence[str | int] | None:
    """Where the model is cut by hand: a list of stages says so itself."""
    if isinstance(model, torch.nn.Module):
        return split_at
    if split_at is not None:
        raise InvalidArgument("Pipeline: a list of stages is cut between its entries; leave split_at out")
    return range(1, len(model))


# --- A forward that torch.fx can follow -------------------------------------------------------------------------------


class _Tracer(torch.fx.Tracer):
    """Follows a model's own forward; children are opaque, except lists and Sequentials, which have no forward.

    It refuses a call in surroundings that the graph does not record: stages call layers outside of the forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._around = _surroundings()

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_module(self, m: torch.nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = _surroundings()
        for what, value in self._around.items():
            if now[what] != value:
                raise InvalidArgument(
                    f"its forward calls layer {self.path_of_module(m)} under another {what} than its own; do that in "
                    "a module"
                )
        return super().call_module(m, forward, args, kwargs)


def _surroundings() -> dict[str, object]:
    """What decides about a call beside its arguments, by what a person calls it."""
    kinds = ("cpu", "cuda")
    return {
        "grad mode (no_grad, enable_grad, inference_mode)": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        ),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        # Of checkpoints as well.
        "saved_tensors_hooks (checkpoint)": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "function mode (torch.device as a context)": len(torch.overrides._get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
        "choice of attention kernels": [
            getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()
            for kernel in ("flash", "mem_efficient", "math", "cudnn")
        ],
    }


def _traced(model: torch.nn.Module) -> Section:
    name = type(model).__name__
    if not any(True for _ in model.children()):
        raise InvalidArgument(f"Pipeline: {name} is no chain of layers: it has no children; {_ADVICE}")
    defaults = {
        p.name: p.default
        for p in inspect.signature(model.forward).parameters.values()
        if p.default is not inspect.Parameter.empty
    }
    # First with every argument; then without those that have a default, which a forward may ask about.
    found = _attempt(model, {})
    if isinstance(found, str) and defaults:
        again = _attempt(model, defaults)
        found = found if isinstance(again, str) else again
    if isinstance(found, str):
        raise InvalidArgument(f"Pipeline: {name} is no chain of layers: {found}; {_ADVICE}")
    return found


def _attempt(model: torch.nn.Module, constants: dict[str, Any]) -> Section | str:
    """The chain, or why there is none, with these values of arguments."""
    modes = {module: module.training for module in model.modules()}
    found = []
    try:
        for mode in (True, False):
            for module in modes:
                module.training = mode
            found.append(_section_of(model, _Tracer().trace(model, concrete_args=constants or None)))
        if found[0].pieces != found[1].pieces or found[0].skips != found[1].skips:
            raise InvalidArgument("what its forward calls depends on self.training; do that in a module")
        return found[0]
    except InvalidArgument as error:
        return str(error)
    except Exception as error:  # whatever the model's own code does with a traced value
        first = next(iter(str(error).splitlines()), "")
        return f"its forward cannot be traced ({type(error).__name__}: {first})"
    finally:
        for module, mode in modes.items():
            module.training = mode


def _section_of(model: torch.nn.Module, graph: torch.fx.Graph) -> Section:
    pieces: list[Piece] = []
    skips: dict[str, list[str]] = {}
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    names: dict[torch.fx.Node, str] = {}  # of calls, by node
    previous: torch.fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            if node.args[0] is not previous:
                raise InvalidArgument("what it returns is not the output of its last layer")
            continue
        if node.op != "call_module":
            if _only_asserts(node):
                continue
            raise InvalidArgument(f"between its layers its forward computes {node.target!s:.60}; make that a module")
        layer = model.get_submodule(str(node.target))
        extra = _extra_of(node, previous, names, arguments)
        name = str(node.target)
        names[node] = name
        pieces.append(Piece(name, layer, ((name, layer),), _keywords_in(node, layer)))
        if extra:
            skips[name] = extra
        previous = node
    seen = [piece.name for piece in pieces]
    if len(set(seen)) != len(seen) and skips:
        raise InvalidArgument("a layer that is used twice and skip connections in one model")
    if not pieces:
        raise InvalidArgument("its forward calls no layer")
    used = {id(p) for piece in pieces for p in piece.layer.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in used:
            raise InvalidArgument(f"no layer that its forward calls has the parameter {name}")
    return Section(pieces, skips)


def _only_asserts(node: torch.fx.Node) -> bool:
    """Whether nothing comes of a node but an assertion, as those that torch.fx writes for fixed arguments."""
    if node.op == "get_attr" and not node.users:
        return True  # read for nothing
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return name in ("_assert", "_assert_async", "_assert_is_none") or (
        name == "eq" and bool(node.users) and all(_only_asserts(user) for user in node.users)
    )


def _extra_of(
    node: torch.fx.Node,
    previous: torch.fx.Node | None,
    names: dict[torch.fx.Node, str],
    arguments: Sequence[torch.fx.Node],
) -> list[str]:
    """The earlier layers whose outputs a call takes behind the previous one."""
    positional = list(node.args)
    if previous is None:
        if positional != list(arguments[: len(positional)]):
            raise InvalidArgument(
                f"its first layer {node.target} does not take the first arguments of its forward in their order"
            )
        return []
    if not positional or positional[0] is not previous:
        raise InvalidArgument(f"layer {node.target} does not take the output of the layer before it first")
    extra = [names[a] for a in positional[1:] if isinstance(a, torch.fx.Node) and a in names]
    if len(extra) != len(positional) - 1:
        raise InvalidArgument(f"layer {node.target} takes an argument of the model by position; pass it by keyword")
    return extra


def _keywords_in(node: torch.fx.Node, layer: torch.nn.Module) -> Passed:
    """The arguments of the model that a call takes by keyword, under their own names.

    The model's first layer takes some by position; a step may name those that the layer calls as the model does.
    """
    accepted = keywords_of(layer, len(node.args))
    positional = [a.target for a in node.args if isinstance(a, torch.fx.Node) and a.op == "placeholder"]
    names = {str(name) for name in positional[1:] if str(name) in (keywords_of(layer, 1) or ())}
    defaults: dict[str, Any] = {}
    required = set()
    for key, value in node.kwargs.items():
        if (
            not isinstance(value, torch.fx.Node)
            or value.op != "placeholder"
            or str(value.target) != key
            or (accepted is not None and key not in accepted)
        ):
            raise InvalidArgument(f"layer {node.target} takes {key}=, which is no argument of the model of that name")
        if value.args:  # its default
            defaults[key] = value.args[0]
        else:
            required.add(key)
    return Passed(frozenset(names | defaults.keys() | required), defaults, frozenset(required))


# --- Decoders of Hugging Face's transformers --------------------------------------------------------------------------


def _is_decoder(model: torch.nn.Module) -> bool:
    body = getattr(model, "model", None)
    return isinstance(body, torch.nn.Module) and all(
        hasattr(owner, name)
        for owner, name in ((body, "embed_tokens"), (body, "layers"), (body, "norm"), (model, "lm_head"))
    )


def _decoder(model: Any) -> Section:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in _DECODERS:
        raise InvalidArgument(
            f"Pipeline: {type(model).__name__} has the parts of a decoder, but what its forward does between them is "
            f"known for config.model_type in {', '.join(_DECODERS)} only, not {kind!r}; {_ADVICE}"
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    if (window is not None and getattr(config, "use_sliding_window", True)) or "sliding_attention" in kinds:
        raise InvalidArgument(
            f"Pipeline: attention over a sliding window of {window} is not supported; "
            "build the model with config.sliding_window=None"
        )
    body = model.model
    rotary = getattr(body, "rotary_emb", None)
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if attention not in ("eager", "sdpa"):
        raise InvalidArgument(
            f"Pipeline: masks for attn_implementation={attention!r} are not known here; build the model with "
            'attn_implementation="sdpa"'
        )
    pieces = [Piece("model.embed_tokens", _Embed(body.embed_tokens), (("model.embed_tokens", body.embed_tokens),))]
    for index, layer in enumerate(body.layers):
        parts = [(f"model.layers.{index}", layer)]
        if rotary is not None:
            parts.append(("model.rotary_emb", rotary))
        pieces.append(Piece(f"model.layers.{index}", _DecoderLayer(layer, rotary, attention == "eager"), tuple(parts)))
    pieces.append(Piece("model.norm", body.norm, (("model.norm", body.norm),)))
    pieces.append(Piece("lm_head", model.lm_head, (("lm_head", model.lm_head),)))
    found = Section(pieces)
    found.initialise = getattr(model, "_init_weights", None)
    return found


class _Embed(torch.nn.Module):
    """The tokens' embeddings; the argument has the name that the model gives it."""

    def __init__(self, embed_tokens: torch.nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.embed_tokens(input_ids)


class _DecoderLayer(torch.nn.Module):
    """One decoder layer with what the model computes for it from the positions: every stage computes its own.

    Args:
        dense: attention that needs a written mask to be causal; others are causal without one.
    """

    def __init__(self, layer: torch.nn.Module, rotary: torch.nn.Module | None, dense: bool) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary
        self._dense = dense
        self._accepted = keywords_of(layer, 1)

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        """``hidden``: (batch, tokens, width); ``attention_mask``: (batch, tokens), 0 where a token is padding."""
        tokens = hidden.shape[1]
        if position_ids is None:
            position_ids = torch.arange(tokens, device=hidden.device)[None]
        given: dict[str, Any] = {
            "attention_mask": self._mask(hidden, attention_mask),
            "position_ids": position_ids,
            "use_cache": False,
        }
        if self.rotary is not None:
            given["position_embeddings"] = self.rotary(hidden, position_ids)
        if self._accepted is not None:
            given = {name: value for name, value in given.items() if name in self._accepted}
        output = self.layer(hidden, **given)
        return output[0] if isinstance(output, tuple) else output

    def _mask(self, hidden: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor | None:
        if padding is None and not self._dense:
            return None
        tokens = hidden.shape[1]
        allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden.device).tril()[None, None]
        if padding is not None:
            allowed = allowed & padding.to(torch.bool)[:, None, None, :]
        lowest = torch.finfo(hidden.dtype).min
        return torch.zeros(allowed.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(~allowed, lowest)
