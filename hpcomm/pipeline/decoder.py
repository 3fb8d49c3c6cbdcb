"""Decoders of Hugging Face's transformers, whose forward is known by their type."""

from __future__ import annotations

from typing import Any

import torch

from hpcomm.errors import InvalidArgument
from hpcomm.pipeline.chain import ADVICE, Piece, Section, keywords_of

__all__: list[str] = []

# Those that compute embed -> layers -> norm -> head and nothing between.
_DECODERS = ("llama", "mistral", "qwen2", "qwen3")


def is_decoder(model: torch.nn.Module) -> bool:
    """Whether ``model`` has the parts of one; what it does between them is another question."""
    body = getattr(model, "model", None)
    return isinstance(body, torch.nn.Module) and all(
        hasattr(owner, name)
        for owner, name in ((body, "embed_tokens"), (body, "layers"), (body, "norm"), (model, "lm_head"))
    )


def decoder_section(model: Any) -> Section:
    """The layers of a decoder, each with what the model computes for it.

    Raises:
        InvalidArgument: its forward is not known here.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in _DECODERS:
        raise InvalidArgument(
            f"Pipeline: {type(model).__name__} has the parts of a decoder, but what its forward does between them is "
            f"known for config.model_type in {', '.join(_DECODERS)} only, not {kind!r}; {ADVICE}"
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
