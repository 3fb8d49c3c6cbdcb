"""Cost models as files: what stages and links take, as JSON that a person can write."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from hpcomm._native import load
from hpcomm.errors import InvalidArgument
from hpcomm.plan.files import parse_json, read_json

if TYPE_CHECKING:
    from hpcomm._C import CostModel, StageCost

FORMAT = "hpcomm.CostModel"
_STAGE = ("forward_seconds", "backward_seconds", "input_grad_seconds", "weight_grad_seconds", "activation_bytes")
_LINKS = ("link", "collective")
_SWITCHES = ("host_copies", "host_waits")
_MOST = 1e30  # of anything: sums of a step's stay finite


def load_costs(path: str | PathLike[str]) -> CostModel:
    """The cost model in a file that ``costs_to_json`` or a person wrote.

    Raises:
        InvalidArgument: an entry is wrong; the message names it.
        OSError: the file cannot be read.
    """
    return _costs(read_json(path, "a cost model"))


def costs_from_json(text: str) -> CostModel:
    """A cost model from JSON text. Everything but ``format`` may be left out::

        {"format": "hpcomm.CostModel",
         "stages": [{"forward_seconds": 0.01, "backward_seconds": 0.02, "activation_bytes": 4e8}, ...],
         "link": {"latency_seconds": 1e-5, "bytes_per_second": 5e10},
         "links": [{"source": 0, "destination": 1, "latency_seconds": 3e-6, "bytes_per_second": 3e11}, ...],
         "messages": [{"source": 0, "destination": 1, "bytes": 4194304}, ...],
         "collective": {"latency_seconds": 1e-5, "bytes_per_second": 1e11},
         "header_seconds": 1e-5, "issue_seconds": 2e-6, "step_seconds": 1e-4, "pack_bytes_per_second": 1e12,
         "ranks_per_host": 8, "cores_per_host": 8, "host_copies": false, "host_waits": false}

    ``stages`` has one entry per stage, or is left out for costs of 1 and 2; a stage without ``input_grad_seconds`` and
    ``weight_grad_seconds`` has halves of its backward. ``links`` are those between pipeline ranks that differ from
    ``link``. ``messages`` has the bytes that go from stage to stage where the plan itself does not say, which may be
    means. Links and messages that a plan has not are left alone, so that one file serves several plans; but what no
    plan has, or stands there twice, is wrong. A bandwidth of ``null`` is infinite.

    Raises:
        InvalidArgument: an entry is wrong; the message names it.
    """
    return _costs(parse_json(text, "a cost model"))


def _costs(document: object) -> CostModel:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidArgument(f'not a cost model: "format" must be "{FORMAT}"')
    if unknown := sorted(document.keys() - _KNOWN):
        raise InvalidArgument(f"a cost model has no {unknown[0]!r}; it has {', '.join(sorted(_KNOWN))}")
    native = load()
    costs: CostModel = native.CostModel()
    costs.stages = [_stage(entry, f"stages[{i}]") for i, entry in enumerate(_list(document, "stages"))]
    for name in _LINKS:
        latency, bandwidth = _link(document.get(name, {}), name)
        setattr(costs, f"{name}_latency_seconds", latency)
        setattr(costs, f"{name}_bytes_per_second", bandwidth)
    costs.links = _links(_list(document, "links"))
    costs.message_bytes = _messages(_list(document, "messages"), len(costs.stages))
    for name, read in _NUMBERS.items():
        if name in document:
            setattr(costs, name, read(document[name], name))
    for name in _SWITCHES:
        if not isinstance(document.get(name, False), bool):
            raise InvalidArgument(f"{name}: expected true or false, found {document[name]!r:.40}")
        setattr(costs, name, document.get(name, False))
    return costs


def costs_to_json(costs: CostModel) -> str:
    """The cost model as JSON text."""

    def bandwidth(value: float) -> float | None:
        return None if math.isinf(value) else value

    return json.dumps(
        {
            "format": FORMAT,
            "stages": [{key: getattr(stage, key) for key in _STAGE} for stage in costs.stages],
            **{
                name: {
                    "latency_seconds": getattr(costs, f"{name}_latency_seconds"),
                    "bytes_per_second": bandwidth(getattr(costs, f"{name}_bytes_per_second")),
                }
                for name in _LINKS
            },
            "links": [
                {"source": a, "destination": b, "latency_seconds": latency, "bytes_per_second": bandwidth(rate)}
                for (a, b), (latency, rate) in costs.links.items()
            ],
            "messages": [
                {"source": a, "destination": b, "bytes": size} for (a, b), size in costs.message_bytes.items()
            ],
            "header_seconds": costs.header_seconds,
            "issue_seconds": costs.issue_seconds,
            "step_seconds": costs.step_seconds,
            "pack_bytes_per_second": bandwidth(costs.pack_bytes_per_second),
            "ranks_per_host": costs.ranks_per_host,
            "cores_per_host": costs.cores_per_host,
            **{name: getattr(costs, name) for name in _SWITCHES},
        },
        indent=1,
    )


def _links(entries: list[Any]) -> dict[tuple[int, int], tuple[float, float]]:
    """Latencies and bandwidths by source and destination."""
    links: dict[tuple[int, int], tuple[float, float]] = {}
    for i, entry in enumerate(entries):
        ends, rest = _ends(entry, where := f"links[{i}]", links)
        links[ends] = _link(rest, where)
    return links


def _messages(entries: list[Any], num_stages: int) -> dict[tuple[int, int], float]:
    """Bytes by source and destination, which are among ``num_stages`` if that is not 0."""
    messages: dict[tuple[int, int], float] = {}
    for i, entry in enumerate(entries):
        ends, rest = _ends(entry, where := f"messages[{i}]", messages)
        if num_stages and max(ends) >= num_stages:
            raise InvalidArgument(
                f"{where}: goes from stage {ends[0]} to stage {ends[1]}, and stages has {num_stages} entries"
            )
        if rest.keys() != {"bytes"}:
            raise InvalidArgument(f"{where}: expected source, destination and bytes, found {entry!r:.60}")
        messages[ends] = _amount(rest["bytes"], f"{where}.bytes")
    return messages


def _list(document: dict[str, Any], key: str) -> list[Any]:
    value = document.get(key, [])
    if not isinstance(value, list):
        raise InvalidArgument(f"{key}: expected a list, found {value!r:.40}")
    return value


def _stage(entry: object, where: str) -> StageCost:
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{where}: expected an object, found {entry!r:.40}")
    if unknown := sorted(entry.keys() - set(_STAGE)):
        raise InvalidArgument(f"{where}: a stage has no {unknown[0]!r}; it has {', '.join(_STAGE)}")
    native = load()
    stage: StageCost = native.StageCost(**{key: _amount(value, f"{where}.{key}") for key, value in entry.items()})
    return stage


def _ends(entry: object, where: str, known: Container[object]) -> tuple[tuple[int, int], dict[str, Any]]:
    """Its source and its destination, which none of those before it has, and what else it says."""
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{where}: expected an object, found {entry!r:.40}")
    rest = dict(entry)
    source, destination = (_int(rest.pop(key, None), f"{where}.{key}") for key in ("source", "destination"))
    if source == destination:
        raise InvalidArgument(f"{where}: source and destination are both {source}; nothing travels there")
    if (source, destination) in known:
        raise InvalidArgument(f"{where}: an entry before it goes from {source} to {destination} as well; leave one out")
    return (source, destination), rest


def _link(entry: object, where: str) -> tuple[float, float]:
    if not isinstance(entry, dict) or entry.keys() - {"latency_seconds", "bytes_per_second"}:
        raise InvalidArgument(f"{where}: expected latency_seconds and bytes_per_second, found {entry!r:.60}")
    latency = _amount(entry.get("latency_seconds", 0), f"{where}.latency_seconds")
    return latency, _bandwidth(entry.get("bytes_per_second"), f"{where}.bytes_per_second")


def _amount(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidArgument(f"{where}: expected a number, at least 0, found {value!r:.40}")
    if value > _MOST:
        raise InvalidArgument(f"{where}: expected a number, at most {_MOST:g}, found {value!r:.40}")
    return float(value)


def _bandwidth(value: object, where: str) -> float:
    if value is None:
        return math.inf
    rate = _amount(value, where)
    if rate < 1 / _MOST:
        least = 1 / _MOST if rate else 0
        raise InvalidArgument(f"{where}: expected a number above {least:g}, or null for infinity, found {rate:g}")
    return rate


def _int(value: object, where: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise InvalidArgument(f"{where}: expected an integer, at least {least}, found {value!r:.40}")
    return value


# Numbers of the whole model, and how each is read.
_NUMBERS: dict[str, Callable[[object, str], float]] = {
    "header_seconds": _amount,
    "issue_seconds": _amount,
    "step_seconds": _amount,
    "pack_bytes_per_second": _bandwidth,
    "ranks_per_host": partial(_int, least=1),
    "cores_per_host": _int,
}
_KNOWN = {"format", "stages", "links", "messages", *_LINKS, *_NUMBERS, *_SWITCHES}
