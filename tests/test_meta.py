"""Models on "meta" and models of several forms: each rank makes its stages only, and they equal one process."""

from __future__ import annotations

import ctypes
import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import hpcomm
from hpcomm.pipeline.adapt import as_chain

VOCABULARY, WIDTH = 11, 8


class Norm(nn.Module):
    """A norm as in transformers: without reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Rotary(nn.Module):
    """Cosines and sines of positions; its buffer is computed when it is built."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", 1.0 / config.base ** (torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
        return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.input_layernorm = Norm()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor]:
        assert position_embeddings is not None
        cos, sin = position_embeddings
        q, k, v = self.qkv(self.input_layernorm(hidden_states)).chunk(3, -1)
        q, k = (t * cos + torch.cat([-t[..., WIDTH // 2 :], t[..., : WIDTH // 2]], -1) * sin for t in (q, k))
        scores = q @ k.transpose(-1, -2)
        if attention_mask is not None:
            scores = scores + attention_mask[:, 0]
        return (hidden_states + scores.softmax(-1) @ v,)


class Body(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(3)])
        self.norm = Norm()
        self.rotary_emb = Rotary(config)


class Decoder(nn.Module):
    """The structure of transformers' LlamaForCausalLM."""

    def __init__(self, tied: bool = False, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**{"model_type": "llama", "base": 100.0, **config})
        self.model = Body(self.config)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.normal_(0.0, 0.3)
        elif isinstance(module, Norm):
            module.weight.fill_(1.0)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.model.embed_tokens(input_ids)
        length = input_ids.shape[1]
        mask = torch.full((length, length), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)[None, None]
        if attention_mask is not None:
            mask = mask.expand(len(input_ids), -1, -1, -1).masked_fill(
                attention_mask[:, None, None, :] == 0, torch.finfo(hidden.dtype).min
            )
        position = self.model.rotary_emb(hidden, torch.arange(length)[None])
        for layer in self.model.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=position)[0]
        return self.lm_head(self.model.norm(hidden))


def decoder(tied: bool = False) -> nn.Module:
    return Decoder(tied).double()


def tied_decoder() -> nn.Module:
    return decoder(tied=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.drop(torch.tanh(self.inner(x)))
        return x + (y if scale is None else y * scale[:, None, None])


class Written(nn.Module):
    """embed -> blocks -> norm -> head, written as a forward with a keyword argument for the blocks."""

    def __init__(self) -> None:
        super().__init__()
        # Registered in another order than they run.
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(self.norm(x))


def written() -> nn.Module:
    return Written().double()


def listed() -> list[nn.Module]:
    first = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH))
    return [first.double(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)).double()]


def tied_chain() -> nn.Module:
    embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = embed.weight
    return nn.Sequential(embed, nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), nn.Tanh(), head).double()


MODELS: dict[str, Callable[[], Any]] = {
    "decoder": decoder,
    "tied_decoder": tied_decoder,
    "written": written,
    "listed": listed,
    "tied_chain": tied_chain,
}


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return MODELS[name]()


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


TOKENS = torch.arange(24).view(4, 6).mul(7) % VOCABULARY


def keywords_of(name: str) -> dict[str, torch.Tensor]:
    if "decoder" in name:
        return {"attention_mask": (torch.arange(6)[None] < torch.tensor([6, 5, 4, 6])[:, None]).long()}
    return {"scale": torch.linspace(0.5, 1.5, 4, dtype=torch.float64)} if name == "written" else {}


def trained(name: str, pp: int, schedule: str) -> tuple[float, dict[str, torch.Tensor], list[str]]:
    with hpcomm.init(pp=pp) as mesh:
        pipe = hpcomm.Pipeline(on_meta(name), mesh=mesh, num_microbatches=2, loss_fn=loss_fn, seed=5, schedule=schedule)
        start = {key: value.clone() for key, value in pipe.full_state_dict().items()}
        here = [key for key, _ in pipe.named_parameters()]
        keywords = keywords_of(name)
        if pp > 1:
            hpcomm.verify(pipe, on_meta(name), TOKENS, target=TOKENS, tolerance=1e-9, **keywords)
        pipe.eval()
        loss = pipe.eval_step(TOKENS, target=TOKENS, **keywords)
        return float(loss), start, here


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("name", MODELS)
def test_stages_from_meta_equal_one_process(name: str, schedule: str) -> None:
    if name == "listed" and schedule == "zbv":
        pytest.skip("its two stages say themselves where they are cut")
    # The model's own forward, and its own names.
    plain = MODELS[name]()
    plain = nn.Sequential(*plain) if isinstance(plain, list) else plain
    chain = as_chain(on_meta(name))
    hpcomm.materialize(chain, seed=5)
    expected = chain.state_dict()
    plain.load_state_dict(expected)
    loss = loss_fn(plain.eval()(TOKENS, **keywords_of(name)), TOKENS).item()

    results = ranks.run(2, trained, name, 2, schedule)
    for found, state, here in results:
        assert found == pytest.approx(loss, rel=1e-12)
        assert state.keys() == plain.state_dict().keys()
        assert len(here) < len(expected)  # a part of the model
        for key, value in state.items():
            assert torch.equal(value, expected[key]), key  # the same bits on every mesh
    owned = {key for _, _, here in results for key in here}
    assert owned >= {key for key, _ in plain.named_parameters()}
    assert len({value.double().sum().item() for value in expected.values() if value.dim() > 1}) > 1


def replicated(names: list[str]) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """The stages of this rank as they were made, and after two steps of training."""
    found = []
    with hpcomm.init(dp=2, pp=2) as mesh:
        for name in names:
            torch.manual_seed(mesh.rank)  # what a rank has drawn before must not count
            random = torch.get_rng_state()
            pipe = hpcomm.Pipeline(on_meta(name), mesh=mesh, num_microbatches=2, loss_fn=loss_fn, seed=5)
            assert torch.equal(torch.get_rng_state(), random)
            made = {key: value.clone() for key, value in pipe.state_dict().items()}
            optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
            for step in range(2):
                tokens = TOKENS.roll(step + 2 * mesh.dp.rank, 1)[:, : 4 + mesh.dp.rank]  # each replica its own shape
                optimizer.zero_grad()
                keywords = {k: v[:, : 4 + mesh.dp.rank] for k, v in keywords_of(name).items() if v.dim() == 2}
                pipe.step(tokens, target=tokens, **keywords)
                optimizer.step()
            found.append((made, pipe.state_dict()))
    return found


def test_replicas_from_meta_are_equal_and_stay_so() -> None:
    names = ["decoder", "tied_chain"]
    results = ranks.run(4, replicated, names)
    for i, name in enumerate(names):
        chain = as_chain(on_meta(name))
        hpcomm.materialize(chain, seed=5)
        expected = chain.state_dict()
        for left, right in ((0, 1), (2, 3)):
            (made, trained), (made_too, trained_too) = results[left][i], results[right][i]
            assert made.keys() == made_too.keys() == trained.keys() == trained_too.keys()
            for key, value in made.items():
                assert torch.equal(value, made_too[key]), key
                assert torch.equal(value, expected[key]), key  # as with one replica, and in one process
                assert torch.equal(trained[key], trained_too[key]), key
            assert any(not torch.equal(value, made[key]) for key, value in trained.items())
        assert results[0][i][0].keys() | results[2][i][0].keys() == expected.keys()


# --- Memory -----------------------------------------------------------------------------------------------------------

LAYERS, SIDE = 16, 2048  # 16 MiB a layer, 256 MiB the model


def big() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)])


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))


def failure_of(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (RuntimeError, MemoryError) as error:
        return str(error)
    return "it fits"


def within(limit: int, dp: int) -> tuple[str, str, int]:
    """What becomes of the whole model, of all of it materialised, and how many layers the pipeline has here."""
    torch.set_num_threads(1)
    # What is freed goes back at once (M_MMAP_THRESHOLD); glibc would keep large pieces, and the limit counts them.
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    with hpcomm.init(dp=dp, pp=2) as mesh:
        mesh.world.barrier()
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + limit, before[1]))
        built = failure_of(lambda: big().requires_grad_(False))
        materialised = failure_of(lambda: hpcomm.materialize(meta_of_big()))
        mesh.world.barrier()
        x = torch.ones(2, SIDE)
        pipe = hpcomm.Pipeline(
            meta_of_big(),
            mesh=mesh,
            num_microbatches=2,
            loss_fn=nn.functional.mse_loss,
            schedule="forward_only",
            balance=hpcomm.Balance(x[:1], repeats=1, memory_limit=10 * SIDE * SIDE * 4 * 4),
        )
        assert torch.isfinite(pipe.eval_step(x, target=x))
        return built, materialised, len(list(pipe.parameters()))


def meta_of_big() -> nn.Module:
    with torch.device("meta"):
        return big()


@pytest.mark.parametrize("dp", [1, 2])
def test_no_rank_ever_holds_the_whole_model(dp: int) -> None:
    # 200 MiB more than the process has: not enough for 256 MiB of the model, enough for a part and what runs it.
    for whole, materialised, layers in ranks.run(2 * dp, within, 200 << 20, dp, timeout=60):
        assert "memory" in whole
        assert "memory" in materialised
        assert 6 <= layers <= 10


# --- Errors -----------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.mask


class Half(Own):
    """Forgets its mask."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def set_all(name: str, module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.fill_(1)


def set_nothing(name: str, module: nn.Module) -> None:
    pass


def test_values_that_nobody_gives_are_an_error() -> None:
    with torch.device("meta"):
        own, half = nn.Sequential(nn.Linear(3, 3), Own()), nn.Sequential(Half())
    with pytest.raises(hpcomm.InvalidArgument, match=r"1 \(Own\) was built on meta and has no reset_parameters\(\)"):
        hpcomm.materialize(own)
    with pytest.raises(hpcomm.InvalidArgument, match=r"0 \(Half\) .* left mask without values"):
        hpcomm.materialize(half)
    with torch.device("meta"):
        linear = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(hpcomm.InvalidArgument, match=r"0 \(Linear\) .* left weight without values"):
        hpcomm.materialize(linear, init_fn=set_nothing)
    with torch.device("meta"):
        own = nn.Sequential(nn.Linear(3, 3), Own())
    hpcomm.materialize(own, init_fn=set_all)
    assert own(torch.ones(3)).tolist() == [4.0, 4.0, 4.0]


def test_batch_norm_and_the_generator() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.GRU(3, 2))
    state = torch.get_rng_state()
    hpcomm.materialize(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.isfinite(w).all() and w.std() > 0 for w in model[1].all_weights[0])
    assert model(torch.ones(4, 3))[0].shape == (4, 2)
    assert model[0].num_batches_tracked == 1


class FailsOnOneRank:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, name: str, module: nn.Module) -> None:
        if self.rank == 1:
            raise ValueError("no such file")
        set_all(name, module)


def one_fails() -> None:
    with hpcomm.init(pp=2) as mesh, torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        hpcomm.Pipeline(
            model, mesh=mesh, num_microbatches=1, loss_fn=nn.functional.mse_loss, init_fn=FailsOnOneRank(mesh.rank)
        )


def test_an_init_fn_that_fails_on_one_rank_is_known_on_all() -> None:
    first, second = ranks.run(2, one_fails, expect_failure=True)
    assert (first.exception, second.exception) == ("InvalidArgument", "ValueError")
    assert "rank 1: ValueError: no such file" in first.message


def checkpointed() -> tuple[bool, list[str]]:
    with hpcomm.init(pp=2) as mesh:
        state = {key: torch.full_like(value, i) for i, (key, value) in enumerate(decoder().state_dict().items())}
        pipe = hpcomm.Pipeline(on_meta("decoder"), mesh=mesh, num_microbatches=1, loss_fn=loss_fn)
        pipe.load_state_dict(state)
        found = pipe.full_state_dict()
        return all(torch.equal(found[key], value) for key, value in state.items()), list(pipe.state_dict())


def test_a_checkpoint_of_the_whole_model_is_loaded_by_stage() -> None:
    (equal, first), (also_equal, second) = ranks.run(2, checkpointed)
    assert equal
    assert also_equal
    assert first[0] == "model.embed_tokens.weight"
    assert second[-1] == "lm_head.weight"


# --- What is no chain -------------------------------------------------------------------------------------------------


class Glue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


class Branches(Glue):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if x.sum() > 0 else self.a(x)


class Unused(Glue):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


class Reversed(nn.Sequential):
    """A Sequential that runs in another order than it says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(list(self)):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Glue(), r"between its layers its forward computes \S*relu\S* \(line \d+ of .*test_meta.py: .*relu.*\); make"),
        (Branches(), "its forward cannot be traced"),
        (Unused(), "no layer that its forward calls has the parameter b.weight"),
        (Decoder(model_type="gemma"), "known for config.model_type in llama, mistral, .* only, not 'gemma'"),
        (Decoder(_attn_implementation="flex_attention"), 'build the model with attn_implementation="sdpa"'),
        (Decoder(sliding_window=4), "sliding window of 4 is not supported"),
        ([], "a list of stages holds one nn.Module per stage"),
        ([nn.Linear(1, 1), None], "a list of stages holds one nn.Module per stage"),
    ],
)
def test_models_that_are_no_chain(model: Any, words: str) -> None:
    with pytest.raises(hpcomm.InvalidArgument, match=words):
        as_chain(model)


def test_a_place_in_a_package_whose_name_begins_as_torchs_is_named() -> None:
    file = f"{Path(torch.__file__).parent}vision/nets.py"
    source = "class Net(Glue):\n    def forward(self, x):\n        return self.b(torch.relu(self.a(x)))\n"
    names: dict[str, Any] = {"Glue": Glue, "torch": torch}
    exec(compile(source, file, "exec"), names)  # noqa: S102
    with pytest.raises(hpcomm.InvalidArgument, match=re.escape(f"torch.relu (line 3 of {file})")):
        as_chain(names["Net"]())


def test_a_sequential_with_a_forward_of_its_own_runs_as_that_says() -> None:
    model = Reversed(nn.Linear(3, 2), nn.Linear(4, 3))
    x = torch.ones(1, 4)
    assert torch.equal(as_chain(model)(x), model(x))
