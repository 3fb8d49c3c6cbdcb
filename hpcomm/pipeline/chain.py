"""Chain: layers that run one after the other, with skip connections and keyword arguments into any of them."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.randomness import may_draw

if TYPE_CHECKING:
    from hpcomm.pipeline.randomness import Draws

__all__: list[str] = []

# In messages about a model that is no chain.
ADVICE = "write it as an nn.Sequential, or as a hpcomm.Chain where layers take more than the output before them"

_CHECKPOINTED = "_checkpoint_wrapped_module"  # torch.distributed.algorithms' wrapper's


class Chain(torch.nn.Sequential):
    """An ``nn.Sequential`` whose layers may also take outputs of earlier ones, and keyword arguments.

    Layer ``n`` is called as ``layer(previous, *skips, **keywords)``: the output of the layer before it, the outputs of
    the layers that ``skips`` names for it, and those keyword arguments of the call whose names its ``forward`` has.
    The first layer gets the positional arguments of the call. What a layer returns (a tensor, or a tree of tuples,
    lists and dicts around tensors, numbers and None) is one argument of the next.

    It runs by itself as any module does; a Pipeline made of it sends the skipped values from stage to stage.

    Args:
        layers: modules, or names and modules.
        skips: name of a layer to the names of the earlier layers whose outputs it takes as well.

    Raises:
        InvalidArgument: ``skips`` names an unknown layer, or one that does not come earlier.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module],
        *,
        skips: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        named = layers if isinstance(layers, Mapping) else {str(i): layer for i, layer in enumerate(layers)}
        super().__init__(OrderedDict(named))
        self.skips = {name: list(sources) for name, sources in (skips or {}).items()}
        require_skips(list(named), self.skips)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The output of the last layer."""
        return run_alone(self, inputs, keywords, None, 0)


class Passed(NamedTuple):
    """Keyword arguments that a model's own forward passes on to a layer."""

    names: frozenset[str]
    defaults: dict[str, Any]  # the model's
    required: frozenset[str]  # those that its forward demands by keyword


class Piece(NamedTuple):
    """One layer of a model that is no Sequential: what runs, and the modules of the model that it is made of."""

    name: str
    layer: torch.nn.Module
    parts: tuple[tuple[str, torch.nn.Module], ...]  # dotted names in the model
    # What the model's forward passes on by keyword; None: whatever the layer takes.
    keywords: Passed | None = None


class Section(torch.nn.Module):
    """Layers that run one after the other, whose parameters keep dotted names, as ``model.layers.0.weight``.

    The modules are registered under those names; what runs may be a wrapper around them, which is not registered, so
    that it leaves no trace in the state.
    """

    def __init__(self, pieces: Sequence[Piece], skips: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__()
        self.pieces = list(pieces)
        self.skips = {name: list(sources) for name, sources in (skips or {}).items()}
        # Gives values to a module without reset_parameters, where the model has a convention for that.
        self.initialise: Callable[[torch.nn.Module], Any] | None = None
        for piece in pieces:
            for name, module in piece.parts:
                *path, last = name.split(".")
                home: torch.nn.Module = self
                for step in path:
                    if step not in home._modules:
                        home.add_module(step, torch.nn.Module())
                    home = home.get_submodule(step)
                home.add_module(last, module)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The output of the last layer."""
        return run_alone(self, inputs, keywords, None, 0)

    def train(self, mode: bool = True) -> Section:
        """Wrappers as well: they are no children."""
        super().train(mode)
        for piece in self.pieces:
            piece.layer.train(mode)
        return self


def section(model: torch.nn.Module, first: int, end: int) -> torch.nn.Module:
    """Layers ``first`` to ``end`` (not included) of a chain as a module whose parameters keep their names."""
    if isinstance(model, Section):
        part = Section(model.pieces[first:end])
        part.initialise = model.initialise
        return part
    layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
    return torch.nn.Sequential(OrderedDict(layers[first:end]))


def joined(stages: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """The layers of several stages in one module, under their names in the plain model."""
    if any(isinstance(stage, Section) for stage in stages):
        return Section([piece for stage in stages if isinstance(stage, Section) for piece in stage.pieces])
    return torch.nn.Sequential(OrderedDict(layer for stage in stages for layer in layers_of(stage)))


def skips_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """The skip connections of a model that is cut into stages: those of a :class:`Chain`."""
    return model.skips if isinstance(model, (Chain, Section)) else {}


def require_skips(names: list[str], skips: Mapping[str, Sequence[str]]) -> None:
    """Raises InvalidArgument unless every skip leads from an earlier layer to a later one, past one at least."""
    place = {name: i for i, name in enumerate(names)}
    for target, sources in skips.items():
        for source in sources:
            for name in (target, source):
                if name not in place:
                    raise InvalidArgument(f"skips: there is no layer {name!r}; the chain has {', '.join(names)}")
            if place[source] >= place[target]:
                raise InvalidArgument(f"skips: layer {target!r} takes the output of {source!r}, which comes later")


def layers_of(stage: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The named layers that run one after the other in a stage; a stage that is no Sequential is one layer."""
    if isinstance(stage, Section):
        return [(piece.name, piece.layer) for piece in stage.pieces]
    if isinstance(stage, torch.nn.Sequential) and type(stage).forward in (torch.nn.Sequential.forward, Chain.forward):
        return list(stage._modules.items())  # with repetitions, as forward() runs them
    return [("", stage)]


def keywords_of(layer: torch.nn.Module, positional: int) -> frozenset[str] | None:
    """Names that the layer's ``forward`` takes by keyword, behind ``positional`` arguments; None for any name. Of what
    torch.compile and checkpoint_wrapper have wrapped those of the layer inside, of a chain those of its layers.
    """
    while isinstance(inner := getattr(layer, "_orig_mod", getattr(layer, _CHECKPOINTED, None)), torch.nn.Module):
        layer = inner
    if isinstance(layer, (Chain, Section)):
        of_each = [call.keywords for call in calls_of(layer, 1, skips_of(layer))]
        return None if None in of_each else frozenset[str]().union(*(names or () for names in of_each))
    try:
        parameters = list(inspect.signature(layer.forward).parameters.values())
    except (TypeError, ValueError):  # written in C, without a signature
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    late = ordered[positional:] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return frozenset(p.name for p in late if p.kind is not p.POSITIONAL_ONLY)


class Call(NamedTuple):
    """One layer of a stage and what it is called with."""

    name: str
    layer: torch.nn.Module
    place: int  # in the whole model
    skips: tuple[str, ...]
    keywords: frozenset[str] | None  # of the step's; None: all of them
    defaults: Mapping[str, Any]  # of those that the step leaves out
    required: frozenset[str]  # those that it may not leave out
    draws: bool  # random numbers, in training
    is_first: bool  # of the model: takes the positional arguments of the step


def trains(layer: torch.nn.Module) -> bool:
    """Whether a part of it is in training: one whose dropout alone is draws."""
    return any(module.training for module in layer.modules())


def calls_of(stage: torch.nn.Module, first: int, skips: Mapping[str, Sequence[str]]) -> list[Call]:
    """The layers of a stage whose first one is layer ``first`` of the model."""
    calls = []
    pieces = stage.pieces if isinstance(stage, Section) else [Piece(*each, ()) for each in layers_of(stage)]
    for index, (name, layer, _, passed) in enumerate(pieces, first):
        sources = tuple(skips.get(name, ()))
        # The first layer's own arguments come by position, as many as the step is given.
        accepted = keywords_of(layer, 1 + len(sources)) if passed is None else passed.names
        defaults, required = ({}, frozenset[str]()) if passed is None else passed[1:]
        calls.append(
            Call(name, layer, index, sources, accepted, defaults, required, may_draw(layer), is_first=index == 0)
        )
    return calls


def calls_by_stage(modules: Sequence[torch.nn.Module], skips: Mapping[str, Sequence[str]]) -> list[list[Call]]:
    """The layers of every stage, in order."""
    calls: list[list[Call]] = []
    first = 0
    for stage in modules:
        calls.append(calls_of(stage, first, skips))
        first += len(calls[-1])
    return calls


def run(
    calls: Sequence[Call],
    value: Any,
    known: dict[str, Any],
    wanted: frozenset[str],
    keywords: Mapping[str, Any],
    draws: Draws | None,
    microbatch: int,
) -> Any:
    """The output of the last of ``calls``.

    Args:
        value: output of the layer before; the tuple of positional arguments for the model's first layer.
        known: outputs of skipped layers by name; outputs of ``wanted`` layers are added to it.
        keywords: of the step.
        draws: seeds for layers that draw random numbers in training; None to leave the generator alone.
    """
    for name, layer, place, skips, accepted, defaults, _, is_random, is_first in calls:
        if draws is not None and is_random and trains(layer):
            draws.enter(microbatch, place)
        mine = {k: item for k, item in keywords.items() if accepted is None or k in accepted} if keywords else {}
        if defaults:
            mine = {**defaults, **mine}
        if is_first:
            value = _of_first(name, layer, value, mine)
        elif skips:
            value = layer(value, *[known[source] for source in skips], **mine)
        else:
            value = layer(value, **mine)
        if name in wanted:
            known[name] = value
    return value


def _of_first(name: str, layer: torch.nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The output of the model's first layer. A target that is passed by position arrives there."""
    try:
        return layer(*inputs, **keywords)
    except TypeError as error:
        if (problem := misfit(layer.forward, inputs, keywords)) is None:
            raise
        raise InvalidArgument(
            f"the first layer, {name!r} ({type(layer).__name__}), does not take the positional arguments of the step, "
            f"{len(inputs)} of them: {problem}. A target is passed by keyword, step(x, target=y)"
        ) from error


def misfit(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any] = {}) -> str | None:  # noqa: B006
    """Why ``function`` cannot be called like that; None where it can, or nobody knows. For an error, not ahead of a
    call: a look at a signature takes as long as a small layer.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        return str(error)
    return None


def run_alone(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    draws: Draws | None,
    microbatch: int,
) -> Any:
    """The whole model in this process."""
    skips = skips_of(model)
    calls = calls_of(model, 0, skips)
    require_taken(calls, keywords)
    require_given(calls, keywords)
    if not calls:
        return inputs[0]
    return run(calls, inputs, {}, frozenset(sum(skips.values(), [])), keywords, draws, microbatch)


def require_taken(calls: Sequence[Call], keywords: Iterable[str]) -> None:
    """Raises InvalidArgument for a keyword argument that no layer takes."""
    for name in keywords:
        if not any(call.keywords is None or name in call.keywords for call in calls):
            raise InvalidArgument(f"no layer of the model takes the keyword argument {name!r}")


def require_given(calls: Sequence[Call], keywords: Iterable[str]) -> None:
    """Raises InvalidArgument for a keyword argument that the model's own forward demands and that is not there."""
    given = set(keywords)
    for call in calls:
        for name in sorted(call.required - given):
            raise InvalidArgument(f"the model's forward has no default for the keyword argument {name!r}: pass it")
