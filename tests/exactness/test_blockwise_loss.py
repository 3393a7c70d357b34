"""Head and loss by blocks of tokens: torch's numbers, without all logits, wherever the weight lies."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.errors import ConfigError
from ebbtide.nn import blockwise_loss, linear_cross_entropy
from ebbtide.nn.head_loss import LogitsNotMade, LossInPieces, best_loss, obstacle
from harness import config_of

VOCABULARY, WIDTH = 50, 16
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 96,
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise_loss, "BLOCK", 1 << 8)
    monkeypatch.setattr(blockwise_loss, "LEAST", 16)


def operands(
    rows: int, dtype: torch.dtype = torch.float32, bias: bool = True, seed: int = 0
) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    shapes = [(rows, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if bias else [])]
    return [torch.randn(shape, generator=drawn).to(dtype).requires_grad_() for shape in shapes]


def whole(
    rows: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *bias: torch.Tensor, **how: Any
) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(rows, weight, *bias).float(), target, **how)


@given(
    rows=st.integers(1, 70),
    ignored=st.integers(0, 70),
    reduction=st.sampled_from(["mean", "sum"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_as_torch_has_it(
    rows: int, ignored: int, reduction: str, smoothing: float, bias: bool, seed: int
) -> None:
    target = torch.randint(0, VOCABULARY, (rows,), generator=torch.Generator().manual_seed(seed))
    target[: min(ignored, rows - 1)] = -100
    how = {"reduction": reduction, "label_smoothing": smoothing}
    one, other = operands(rows, bias=bias, seed=seed), operands(rows, bias=bias, seed=seed)
    expected = whole(one[0], one[1], target, *one[2:], **how)
    found = linear_cross_entropy(other[0], other[1], target, *other[2:], **how)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    (3 * expected).backward()
    (3 * found).backward()
    for a, b in zip(one, other, strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= 1e-6 * a.grad.abs().max().clamp(min=1e-6)


def test_all_ignored_and_nothing_at_all() -> None:
    for rows in (0, 40):
        rows_, weight = operands(rows, bias=False)
        target = torch.full((rows,), -100)
        assert linear_cross_entropy(rows_, weight, target).isnan()
        assert linear_cross_entropy(rows_, weight, target, reduction="sum") == 0


def test_labels_out_of_range_are_torchs_own_error() -> None:
    rows, weight = operands(40, bias=False)
    target = torch.full((40,), VOCABULARY)
    with pytest.raises(IndexError, match="out of bounds"):
        whole(rows, weight, target)
    with pytest.raises(IndexError, match="out of bounds"):
        linear_cross_entropy(rows, weight, target)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input": torch.zeros(4, 3)}, "found .4, 3. and .50, 16."),
        ({"target": torch.zeros(5, dtype=torch.long)}, "one for each row of the input"),
        ({"target": torch.zeros(4)}, "class indices"),
        ({"reduction": "none"}, "'mean' or 'sum'"),
    ],
)
def test_operands_that_do_not_fit_are_named(change: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {
        "input": torch.zeros(4, WIDTH),
        "weight": torch.zeros(VOCABULARY, WIDTH),
        "target": torch.zeros(4, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=said):
        linear_cross_entropy(**(good | change))


def test_fp16_is_scaled_before_it_could_vanish() -> None:
    target = torch.arange(40) % VOCABULARY
    one, other = operands(40, torch.float16, bias=False), operands(40, torch.float16, bias=False)
    scale = 1024.0
    (whole(one[0] * 1e-3, one[1], target) * scale).backward()
    (linear_cross_entropy(other[0] * 1e-3, other[1], target) * scale).backward()
    assert one[1].grad is not None and other[1].grad is not None and other[1].grad.count_nonzero()
    torch.testing.assert_close(other[1].grad, one[1].grad, rtol=2e-2, atol=1e-3)


def test_a_graph_that_is_kept_gives_its_gradients_again() -> None:
    rows, weight = operands(40, bias=False)
    loss = linear_cross_entropy(rows, weight, torch.arange(40) % VOCABULARY)
    (2 * loss).backward(retain_graph=True)
    first = weight.grad
    assert first is not None
    weight.grad = None
    (2 * loss).backward()
    assert weight.grad is not None and torch.equal(weight.grad, first)


def test_under_autocast_as_torch() -> None:
    target = torch.arange(40) % VOCABULARY
    one, other = operands(40), operands(40)
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(one[0], one[1], target, one[2])
        found = linear_cross_entropy(other[0], other[1], target, other[2])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    expected.backward()
    found.backward()
    for a, b in zip(one, other, strict=True):
        assert a.grad is not None and b.grad is not None and b.grad.dtype == torch.float32
        torch.testing.assert_close(b.grad, a.grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_none_are_computed(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = operands(40, bias=False)
    target = torch.arange(40) % VOCABULARY
    monkeypatch.setattr(blockwise_loss._Sums, "add", lambda *_: pytest.fail("a gradient that nobody wants"))
    with mode():
        found = linear_cross_entropy(rows, weight, target)
    torch.testing.assert_close(found, whole(rows, weight, target).detach())


def test_a_gradient_of_a_gradient_is_refused() -> None:
    rows, weight = operands(40, bias=False)
    loss = linear_cross_entropy(rows, weight, torch.arange(40) % VOCABULARY)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_a_factor_of_the_loss_is_not_rounded_to_the_weights_precision() -> None:
    target = torch.arange(40) % VOCABULARY
    one, other = operands(40, torch.bfloat16, bias=False), operands(40, torch.bfloat16, bias=False)
    linear_cross_entropy(*one, target).backward()
    (linear_cross_entropy(*other, target) / 300).backward()  # bf16 has no 1/300: it would be off by 0.1 %
    assert one[1].grad is not None and other[1].grad is not None
    assert other[1].grad.norm().float() * 300 / one[1].grad.norm().float() == pytest.approx(1, abs=3e-4)


def test_never_all_logits_at_once() -> None:
    """The largest tensor that is made is a block's, or a gradient's."""
    largest = 0

    class Look(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    rows, weight = operands(1000, bias=False)
    target = torch.arange(1000) % VOCABULARY
    with Look():
        linear_cross_entropy(rows, weight, target).backward()
    assert largest == 1000 * WIDTH  # the input's gradient; logits would be three times that


# -- in models -----------------------------------------------------------------------------------------------


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(MODEL | {"use_cache": False} | changes))
    return transformers.AutoModelForCausalLM.from_config(config)


def batches() -> Iterator[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(0, 96, (2, 24), generator=drawn)
        labels = ids.clone()
        labels[:, :3] = -100
        yield {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        ("Llama", True),
        ("Mistral", True),
        ("Qwen2", True),
        ("Mixtral", True),
        ("Gemma2", False),  # a soft cap
        ("Cohere", False),  # a factor
        ("Granite", False),
    ],
)
def test_which_models(kind: str, fits: bool) -> None:
    made = getattr(transformers, f"{kind}Config")(**(MODEL | {"num_key_value_heads": 2, "pad_token_id": 0}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert (obstacle(model) == "") is fits
    assert best_loss("auto", model) == ("pieces" if fits else "whole")
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert {name: set(known) for name, known in before.items()} == {
        name: set(known) for name, known in after.items()
    }


def test_a_models_loss_and_gradients() -> None:
    plain, model = llama(), llama()
    pieces = LossInPieces(model)
    for batch in batches():
        expected, found = plain(**batch), model(**batch)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
        expected.loss.backward()
        found.loss.backward()
        with pytest.raises(AttributeError, match='loss = "whole"'):
            found.logits.argmax(-1)
        assert isinstance(model(**batch, return_dict=False)[1], LogitsNotMade)
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, name
        torch.testing.assert_close(b.grad, a.grad, rtol=2e-5, atol=2e-7)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
    assert model(batch["input_ids"]).logits.shape == (2, 24, 96)
    items = torch.tensor(30)
    torch.testing.assert_close(
        model(**batch, num_items_in_batch=items).loss, plain(**batch, num_items_in_batch=items).loss
    )
    flat = functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:].reshape(-1)
    torch.testing.assert_close(
        model(**batch, shift_labels=flat).loss, plain(**batch).loss, rtol=1e-6, atol=1e-6
    )
    given = (batch["input_ids"], None, None, None, None, batch["labels"])
    assert isinstance(model(*given).logits, LogitsNotMade)
    pieces.remove()
    assert torch.equal(model(**batch).logits, plain(**batch).logits)


def test_logits_that_were_not_made_say_so() -> None:
    asked: list[Any] = [
        lambda logits: logits[:, -1],
        lambda logits: torch.argmax(logits, -1),
        lambda logits: functional.cross_entropy(logits, torch.zeros(1)),
        lambda logits: 2 * logits,
        lambda logits: logits.shape,
        len,
    ]
    for ask in asked:
        with pytest.raises((TypeError, AttributeError), match='loss = "whole"'):
            ask(LogitsNotMade())


class WithPenalty(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Its forward reads logits besides."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.loss = out.loss + 0.1 * out.logits.logsumexp(-1).square().mean()
        return out


def test_a_forward_that_may_read_logits_is_left_alone() -> None:
    config = transformers.LlamaConfig(**MODEL)
    assert "may read logits" in obstacle(WithPenalty(config))
    model = llama()
    model.register_forward_hook(lambda module, args, out: None)
    assert "forward hooks" in obstacle(model)


def test_a_cast_between_head_and_loss_is_seen() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 96, "state_size": 4}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    assert "something lies between" in obstacle(model)


def test_what_changes_what_the_head_gave_is_named() -> None:
    model = llama()
    LossInPieces(model)
    model.lm_head.register_forward_hook(lambda module, args, out: out * 1.0)
    with pytest.raises(ConfigError, match='use loss = "whole"'):
        model(**next(batches()))


@pytest.mark.parametrize("tied", [False, True])
def test_one_hash_wherever_the_weight_lies(tied: bool) -> None:
    found = set()
    for memory in (None, 400_000, "least"):
        device = {} if memory is None else {"memory": memory}
        engine = ebbtide.initialize(
            llama(tie_word_embeddings=tied),
            config_of(precision="fp32", loss="pieces", device=device, chunk_size="16KiB"),
        )
        for batch in batches():
            engine.backward(engine(**batch).loss)
            engine.step()
        assert not engine.stats()["diverged"]
        found.add(engine.weights_sha256())
        engine.close()
    assert len(found) == 1


def test_the_budget_falls_by_the_logits() -> None:
    needed = {}
    for loss in ("whole", "pieces"):
        engine = ebbtide.initialize(llama(vocab_size=2048), config_of(precision="fp32", loss=loss))
        needed[loss] = engine.fit(next(batches())).least
        engine.close()
    logits = 2 * 24 * 2048 * 4
    assert needed["whole"] - needed["pieces"] >= logits


def test_a_copy_has_logits() -> None:
    engine = ebbtide.initialize(llama(), config_of(precision="fp32", loss="pieces"))
    with engine.resident():
        made = copy.deepcopy(engine.module)
    batch = next(batches())
    assert torch.isfinite(made(**batch).logits).all()
    engine.close()
    assert isinstance(engine.module.lm_head, nn.Linear) and "forward" not in vars(engine.module.lm_head)  # type: ignore[arg-type]


def test_a_model_that_cannot_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r'loss = "pieces": .*linear_cross_entropy in forward'):
        ebbtide.initialize(nn.Linear(3, 3), config_of(loss="pieces"))


# -- others' losses, which read the head's weight outside of its module -----------------------------------------------


class GradientsInForward(torch.autograd.Function):
    """As Liger's fused loss: gradients are computed with the loss, piece by piece, and scaled in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), PIECE):
            rows, labels = hidden[start : start + PIECE], target[start : start + PIECE]
            logits = rows @ weight.T
            total += functional.cross_entropy(logits, labels, reduction="sum")
            wrong = logits.softmax(-1)
            wrong[torch.arange(len(labels)), labels] -= 1
            grad_hidden[start : start + PIECE] = wrong @ weight
            grad_weight += wrong.T @ rows
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        return scale * grad_hidden, scale * grad_weight, None


def checkpointed(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As TRL's fused head: each piece's logits are made again in backward."""

    def piece(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional.linear(rows, weight).float(), labels, reduction="sum")

    both = zip(hidden.split(PIECE), target.split(PIECE), strict=True)
    return sum(checkpoint(piece, rows, labels, use_reentrant=False) for rows, labels in both)  # type: ignore[return-value]


PIECE = 16
OTHERS = {"liger": GradientsInForward.apply, "trl": checkpointed}


class WithOthers(nn.Module):
    def __init__(self, tied: bool, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = llama(tie_word_embeddings=tied), loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=input_ids).last_hidden_state
        found: torch.Tensor = self.loss(hidden.flatten(0, 1), self.model.lm_head.weight, input_ids.flatten())
        return found / input_ids.numel()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", OTHERS)
def test_others_losses_under_a_budget(kind: str, tied: bool) -> None:
    found = set()
    for memory in (None, 400_000, "least"):
        device = {} if memory is None else {"memory": memory}
        settings = config_of(precision="fp32", device=device, chunk_size="16KiB")
        engine = ebbtide.initialize(WithOthers(tied, OTHERS[kind]), settings)
        for batch in batches():
            engine.backward(engine(**batch))
            engine.step()
        assert not engine.stats()["diverged"]
        found.add(engine.weights_sha256())
        engine.close()
    assert len(found) == 1


def test_gradients_of_a_transform_within_forward_are_refused_and_training_goes_on() -> None:
    """torch.func.grad and hooks on what is saved exclude each other, as in a checkpoint of plain PyTorch."""
    transformed = True

    def loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if transformed:
            torch.func.grad(lambda rows: (rows @ weight.T).sum())(hidden)
        return functional.cross_entropy(hidden @ weight.T, target)

    device = {"memory": 400_000}
    engine = ebbtide.initialize(
        WithOthers(False, loss), config_of(precision="fp32", device=device, chunk_size="16KiB")
    )
    batch = next(batches())
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        engine(**batch)
    transformed = False
    engine.backward(engine(**batch))
    assert engine.step().updated
    engine.close()
