"""A tiny base and amplified adapters of every method that the engine's tests serve.

`build(folder)` writes what PEFT writes; `next_logprobs` and `greedy` say what a model of torch
makes of a sequence, and `check_scores` holds a completion to it.
"""

import warnings
from pathlib import Path

import numpy as np
import torch
from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig
from peft_oracle import base_model, load_with_peft, save_adapter

from scute_jax.serving import Completion

BASE = "biased"
SHARE = 1e-4  # of the adapter's own effect on the log-probabilities, in float32
BASE_ERROR = 1e-5
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def recipes() -> dict:
    """Name -> (PEFT config, how much its numbers are moved)."""
    lora = {"target_modules": EVERY, "init_lora_weights": False}
    return {
        "lora": (LoraConfig(r=5, lora_alpha=9, **lora), 0.1),
        "rslora": (
            LoraConfig(r=8, use_rslora=True, rank_pattern={"v_proj": 33}, lora_bias=True, **lora),
            0.1,
        ),
        "dora": (LoraConfig(r=4, lora_alpha=4, use_dora=True, **lora), 0.1),
        "ia3": (
            IA3Config(
                target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
            ),
            0.3,
        ),
        "ia3-out": (IA3Config(target_modules=EVERY, feedforward_modules=[]), 0.3),
        "vera": (VeraConfig(r=20, target_modules=["q_proj", "o_proj", "down_proj"]), 1.0),
        "vera-regenerated": (_regenerated(), 1.0),
        "oft": (OFTConfig(oft_block_size=4, target_modules=EVERY), 0.1),
        "oft-cayley": (
            OFTConfig(oft_block_size=12, use_cayley_neumann=False, target_modules=ATTENTION),
            0.1,
        ),
    }


NAMES = (
    "lora", "rslora", "dora", "ia3", "ia3-out", "vera", "vera-regenerated", "oft", "oft-cayley",
)  # fmt: skip


def _regenerated() -> VeraConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT advises to save what it can draw again
        return VeraConfig(
            r=37, target_modules=ATTENTION, projection_prng_key=7, save_projection=False
        )


def build(folder: Path) -> dict[str, Path]:
    """The base under "base", and a folder for each adapter."""
    base_model(BASE).save_pretrained(folder / "base")
    names = recipes()
    for seed, (name, (config, scale)) in enumerate(names.items()):
        save_adapter(config, BASE, folder / name, seed=seed, scale=scale)
    return {name: folder / name for name in ["base", *names]}


def oracle(folder: Path | None) -> torch.nn.Module:
    """The base as transformers runs it, or with an adapter as PEFT does, in float32."""
    return base_model(BASE) if folder is None else load_with_peft(folder, BASE)


def next_logprobs(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """The log-probability of each token but the first, float64 softmax of float32 logits."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        scores = torch.log_softmax(model(tokens).logits[0].double(), -1)
    return scores[torch.arange(len(ids) - 1), tokens[0, 1:]].numpy()


def check_scores(
    completion: Completion,
    expected: np.ndarray,
    plain: np.ndarray | None,
    amplified: float,
    since: tuple[int, ...] = (0,),
) -> None:
    """Asserts that a completion has these log-probabilities, in the mean over its tokens.

    `plain` are those of the base, None if the completion is the base's own; the adapter has to
    change them by more than `amplified`. Tokens from each place in `since` on are held, too.
    """
    assert completion.error is None
    gaps = np.abs(np.array([*completion.prompt_logprobs[1:], *completion.logprobs]) - expected)
    effect = None if plain is None else np.abs(expected - plain).mean()
    assert effect is None or effect > amplified, f"{completion.adapter} is not amplified"
    bound = BASE_ERROR if effect is None else SHARE * effect
    for first in since:
        error = gaps[first:].mean()
        assert error <= bound, f"{completion.adapter}: {error:.1e} of an effect of {effect}"


def check_greedy(model: torch.nn.Module, ids: list[int], tokens: list[int]) -> None:
    """Fails unless each token is the model's most likely one after those before it. That is what
    greedy decoding gives, token by token, for the cost of one forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*ids, *tokens]])).logits[0]
    assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == list(tokens)


def greedy(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    """What transformers' own generate continues with, end-of-text tokens or not."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        out = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=-1,
        )
    return out[0, len(ids) :].tolist()
