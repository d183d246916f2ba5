"""The real model: SmolLM2-135M-Instruct with amplified adapters, against transformers and PEFT."""

import warnings

import numpy as np
import pytest

REASON = "the oracles are transformers and the PEFT library, which need torch"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("peft.tuners", reason=REASON)

import tenants  # noqa: E402
from peft import (  # noqa: E402
    IA3Config,
    LoraConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)

from scute_jax.serving import Engine, Request, SamplingParams  # noqa: E402

pytestmark = pytest.mark.model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
FF = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
RECIPES = {
    "lora": (LoraConfig(r=16, target_modules=EVERY, init_lora_weights=False), 0.04),
    "rslora": (LoraConfig(r=3, use_rslora=True, target_modules=["q_proj", "up_proj"]), 0.05),
    "dora": (LoraConfig(r=8, use_dora=True, target_modules=ATTENTION), 0.15),
    "dora-mlp": (LoraConfig(r=4, use_dora=True, target_modules=["up_proj", "down_proj"]), 0.15),
    "ia3": (IA3Config(**FF), 0.3),
    "ia3-out": (IA3Config(target_modules=ATTENTION, feedforward_modules=[]), 0.3),
    "vera": (VeraConfig(r=256, target_modules=["q_proj", "v_proj", "o_proj"]), 0.7),
    "oft": (OFTConfig(oft_block_size=32, target_modules=EVERY), 0.02),
    "oft-exact": (
        OFTConfig(oft_block_size=16, use_cayley_neumann=False, target_modules=ATTENTION),
        0.05,
    ),
}
PAGE_BYTES = 16 * 2 * 3 * 64 * 4 * 30  # of SmolLM2 in float32
LONG = (None, "lora", "dora", "ia3", "vera", "oft")
QUESTIONS = [
    "What is the capital of France?", "Name three primes.", "Write a haiku about rain.",
    "Explain gravity to a child.", "List the planets.", "What is 17 times 3?",
    "Who wrote Hamlet?", "Translate 'good morning' into Spanish.", "What is photosynthesis?",
    "Give me a recipe for pancakes.", "Why is the sky blue?", "What does a compiler do?",
    "Describe a cat.", "How do I boil an egg?", "What is a prime number?",
    "Tell me a short story.", "What is the largest ocean?", "Define entropy.",
    "How many legs has a spider?", "Name a famous painter.",
]  # fmt: skip


@pytest.fixture(scope="module")
def adapters(smollm2_twin, tmp_path_factory):
    """Name -> (folder, PEFT model) of amplified adapters over the shared twin."""
    made = {}
    for seed, (name, (config, scale)) in enumerate(RECIPES.items()):
        folder = tmp_path_factory.mktemp(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            model = get_peft_model(smollm2_twin, config)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
            model.save_pretrained(folder)
            model.unload()
        made[name] = folder
    return made


@pytest.fixture(scope="module")
def engine(smollm2_path, adapters):
    # On a CPU attention looks at every page there is: those of three long texts will do.
    options = {"max_adapters": len(RECIPES), "memory": 300 * PAGE_BYTES, "prefill_blocks": (16,)}
    engine = Engine.from_pretrained(smollm2_path, dtype="float32", **options)
    for name, folder in adapters.items():
        engine.add_adapter(name, folder)
    return engine


@pytest.fixture
def oracle(smollm2_twin, adapters):
    """Name (None = base) -> the model that transformers or PEFT runs."""
    loaded = []

    def load(name):
        if name is None:
            return smollm2_twin
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded.append(PeftModel.from_pretrained(smollm2_twin, str(adapters[name])).eval())
        return loaded[-1]

    yield load
    for model in loaded:
        model.unload()


@pytest.fixture(scope="module")
def scored(engine):
    """Every adapter and the base with 24 greedy tokens; one of each method past position 1,500."""
    # A text that repeats itself is copied by every adapter alike: none would show an effect.
    long = np.random.default_rng(0).integers(100, 40_000, 1510).tolist()
    short = engine.tokenizer.encode_chat([{"role": "user", "content": QUESTIONS[4]}])
    requests = [
        Request(
            prompt_token_ids=ids,
            adapter=name,
            sampling=SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0),
        )
        for name in (None, *RECIPES)
        for ids in ((long, short) if name in LONG else (short,))
    ]
    return list(zip(requests, engine.generate(requests), strict=True))


@pytest.fixture(scope="module")
def base_scores(scored, smollm2_twin):
    """The base's log-probabilities of every text in `scored`, by its index."""
    return [
        tenants.next_logprobs(smollm2_twin, [*request.prompt_token_ids, *completion.token_ids])
        for request, completion in scored
    ]


@pytest.mark.parametrize("name", [None, *RECIPES])
def test_log_probabilities_and_greedy_text(name, scored, base_scores, oracle):
    model = oracle(name)
    for (request, completion), base in zip(scored, base_scores, strict=True):
        if request.adapter != name:
            continue
        ids = [*request.prompt_token_ids, *completion.token_ids]
        expected = base if name is None else tenants.next_logprobs(model, ids)
        plain = None if name is None else base
        tenants.check_scores(completion, expected, plain, amplified=0.05)
        if len(request.prompt_token_ids) < 100:
            tenants.check_greedy(model, request.prompt_token_ids, completion.token_ids)


def test_the_base_continues_twenty_prompts_as_transformers_does(engine, smollm2_twin):
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [engine.tokenizer.encode_chat(chat) for chat in chats]
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    ours = engine.generate([Request(prompt_token_ids=p, sampling=sampling) for p in prompts])
    for prompt, completion in zip(prompts, ours, strict=True):
        tenants.check_greedy(smollm2_twin, prompt, completion.token_ids)
    assert list(ours[0].token_ids) == tenants.greedy(smollm2_twin, prompts[0], 64)
