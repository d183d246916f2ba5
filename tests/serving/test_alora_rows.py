"""Activated LoRA: base rows up to the last invocation in the prompt, the adapter's behind it."""

import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle is the PEFT library, which needs torch")

import torch  # noqa: E402
from engines import make_engine  # noqa: E402
from peft import LoraConfig  # noqa: E402
from peft_oracle import base_model, load_with_peft, save_adapter  # noqa: E402
from tenants import next_logprobs  # noqa: E402

from scute_jax.models.adapters import invoked_at  # noqa: E402
from scute_jax.models.cache import page_bytes  # noqa: E402
from scute_jax.serving import Request, SamplingParams  # noqa: E402
from scute_jax.serving.pages import page_digests  # noqa: E402

BASE, COUNT = "plain", 10
SHARE, BASE_ERROR = 1e-4, 1e-5
CALL, OTHER = [7, 3, 7], [11]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("alora")
    lora = {"init_lora_weights": False, "task_type": "CAUSAL_LM", "target_modules": ALL}
    configs = {
        "alora": LoraConfig(r=5, alora_invocation_tokens=CALL, lora_alpha=9, **lora),
        "other": LoraConfig(r=3, alora_invocation_tokens=OTHER, use_rslora=True, **lora),
        "lora": LoraConfig(r=4, **lora),
    }
    base_model(BASE).save_pretrained(folder / "base")
    for seed, (name, config) in enumerate(configs.items()):
        save_adapter(config, BASE, folder / name, seed, scale=0.1)
    return {name: folder / name for name in ["base", *configs]}


@pytest.fixture(scope="module")
def engine(folders):
    return make_engine(folders, page_size=16)


def prompts() -> dict[str, list[int]]:
    """Prompts of tokens that are in no invocation, with CALL where the name says."""
    rng = np.random.default_rng(1)

    def words(count):
        return rng.integers(20, 97, count).tolist()

    long = words(75)
    return {
        "never": long,
        "at the start": [*CALL, *words(30)],
        "at the end": [*long, *CALL],
        "twice": [*long[:40], *CALL, *words(21), *CALL, *words(5)],
        "overlapping": [*words(20), 7, 3, 7, 3, 7, *words(9)],
        "on a page": [*long[:32], *CALL, *words(40)],
        "cut off": [*words(30), 7, 3],
        "within": [*long[:50], *CALL, *words(25)],
    }


def peft_run(folder: Path, prompt: list[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The greedy tokens, their log-probabilities and those of the prompt, as PEFT has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_with_peft(folder, BASE)
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=COUNT,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=-1,
            output_logits=True,
            return_dict_in_generate=True,
        )
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].double()
    tokens = out.sequences[0, len(prompt) :].tolist()
    steps = torch.log_softmax(torch.cat(out.logits).double(), -1).numpy()
    scores = torch.log_softmax(logits, -1).numpy()
    generated = steps[np.arange(COUNT), tokens]
    return tokens, generated, scores[np.arange(len(prompt) - 1), prompt[1:]]


def request(prompt, adapter, **fields):
    given = {"max_tokens": COUNT, "ignore_eos": True, "logprobs": 0} | fields
    sampling = SamplingParams(**given)
    return Request(prompt_token_ids=prompt, adapter=adapter, sampling=sampling)


def test_a_mixed_batch(engine, folders):
    requests = [
        request(prompt, adapter, prompt_logprobs=0)
        for prompt in prompts().values()
        for adapter in ("alora", "other", "lora")
    ]
    invoked = 0
    for asked, done in zip(requests, engine.generate(requests), strict=True):
        prompt = list(asked.prompt_token_ids)
        tokens, generated, scored = peft_run(folders[asked.adapter], prompt)
        assert list(done.token_ids) == tokens
        ours = np.array([*done.prompt_logprobs[1:], *done.logprobs])
        expected = np.concatenate([scored, generated])
        plain = next_logprobs(base_model(BASE), [*prompt, *tokens])
        effect = np.abs(expected - plain).mean()
        assert np.abs(ours - expected).mean() <= max(SHARE * effect, BASE_ERROR * (effect < 1e-4))
        invoked += effect > 0.01
    assert invoked == 6 + len(prompts())  # six prompts call "alora", none "other"


def test_pages_of_the_base_serve_every_adapter_up_to_its_invocation(folders):
    engine = make_engine(folders, page_size=16)
    prompt = prompts()["within"]
    engine.generate([request(prompt, None)])
    before = set(engine._parts.pages._page_of)
    sequence = engine._parts.intake.sequence(request(prompt, "alora"), 99, "x", None)
    shared = engine._parts.pages.share(
        page_digests(sequence.tenant.version, prompt, 16, sequence.active_from, "base")
    )
    engine._parts.pages.give_back(shared)
    assert sequence.active_from == 50 and len(shared) == 3 and len(before) == 4
    for name in ("alora", "other", "lora"):
        (done,) = engine.generate([request(prompt, name)])
        tokens, generated, _ = peft_run(folders[name], prompt)
        assert list(done.token_ids) == tokens
        np.testing.assert_allclose(done.logprobs, generated, atol=1e-4)


def test_with_few_pages_each_request_is_what_it_is_alone(engine, folders):
    """Preempted sequences are computed again, in blocks of other sizes and over shared pages."""
    memory = 22 * page_bytes(engine.config, 16, np.float32)
    small = make_engine(folders, page_size=16, memory=memory, max_adapters=2)
    requests = [
        request(prompt, adapter, max_tokens=50)
        for prompt in prompts().values()
        for adapter in (None, "alora", "lora")
    ]
    together = small.generate(requests)
    assert small._parts.scheduler.preemptions > 0
    for asked, done in zip(requests, together, strict=True):
        (alone,) = engine.generate([asked])
        assert done.token_ids == alone.token_ids
        np.testing.assert_allclose(done.logprobs, alone.logprobs, atol=1e-4)


def test_a_page_belongs_to_what_computed_it():
    tokens = list(range(64))

    def digests(version, active_from):
        return page_digests(version, tokens, 16, active_from, "base")

    base = page_digests("base", tokens, 16)
    assert [a == b for a, b in zip(digests("v", 32), base, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    assert [a == b for a, b in zip(digests("v", 31), base, strict=True)] == [True] + [False] * 3
    assert digests("v", 0) == page_digests("v", tokens, 16)
    assert digests("v", 63)[:3] == base[:3]
    for other in (digests("v", 33), digests("w", 32), digests("v", 0)):
        assert not set(digests("v", 32)[2:]) & set(other[2:])


def test_the_last_invocation_counts(engine):
    adapter = engine._registry.adapters()["alora"]
    assert adapter.invocation == tuple(CALL)
    starts = {name: invoked_at(adapter, tuple(prompt)) for name, prompt in prompts().items()}
    assert starts == {
        "never": None,
        "at the start": 0,
        "at the end": 75,
        "twice": 64,
        "overlapping": 22,
        "on a page": 32,
        "cut off": None,
        "within": 50,
    }
    assert invoked_at(None, (1, 2)) == 0
