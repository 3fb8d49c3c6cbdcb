"""A model whose forward calls its children one after the other, as torch.fx proves it."""

from __future__ import annotations

import inspect
import linecache
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx

from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.chain import ADVICE, Passed, Piece, Section, keywords_of

__all__: list[str] = []

_PLACE = "hpcomm_place"  # in a node's meta
_TORCH = f"{Path(torch.__file__).parent}/"  # and not torchvision


class _Tracer(torch.fx.Tracer):
    """Follows a model's own forward; children are opaque, except lists and Sequentials, which have no forward.

    It refuses a call in surroundings that the graph does not record: stages call layers outside of the forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._around = _surroundings()

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta[_PLACE] = _place_in_program()  # torch's record_stack_traces would load sympy
        return node

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


def _described(node: torch.fx.Node) -> str:
    """An operation as a program writes it, and where it does."""
    target = node.target
    if target is getattr:
        name = f".{node.args[1]}"
    elif target is operator.getitem:
        name = "an indexing"
    elif isinstance(target, str):
        name = f".{target}()" if node.op == "call_method" else target
    else:
        module = getattr(target, "__module__", None) or "torch"
        name = f"{'operator' if module == '_operator' else module}.{getattr(target, '__name__', target)}"
    if node.meta.get(_PLACE) is None:
        return name
    file, line = node.meta[_PLACE]
    text = linecache.getline(file, line).strip()
    return f"{name} (line {line} of {file}{': ' if text else ''}{text:.100})"


def _place_in_program() -> tuple[str, int] | None:
    """File and line of the innermost frame that is neither torch's nor this module's."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


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


def traced_section(model: torch.nn.Module) -> Section:
    """The layers that the forward of ``model`` calls, one after the other.

    Raises:
        InvalidArgument: it does anything else; the message says where.
    """
    name = type(model).__name__
    if not any(True for _ in model.children()):
        raise InvalidArgument(f"Pipeline: {name} is no chain of layers: it has no children; {ADVICE}")
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
        raise InvalidArgument(f"Pipeline: {name} is no chain of layers: {found}; {ADVICE}")
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
            raise InvalidArgument(f"between its layers its forward computes {_described(node)}; make that a module")
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
