"""Methods that need more than vectors and terms, in one batch with a LoRA and the base.

Permuted rotations of the input (BOFT of two factors) and of the output (RoAD), input vectors of
terms (RandLoRA where it widens) and sparse matrices (SHiRA, WaveFT), held to the PEFT library.
"""

import warnings

import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle is the PEFT library, which needs torch")

import tenants  # noqa: E402
import torch  # noqa: E402
from boft_extension import with_extension  # noqa: E402, F401
from engines import make_engine  # noqa: E402
from peft import BOFTConfig, LoraConfig, RandLoraConfig, RoadConfig, ShiraConfig, WaveFTConfig  # noqa: E402
from peft_oracle import base_model, save_adapter  # noqa: E402
from test_exactness import prompt  # noqa: E402

from scute_jax.serving import Request, SamplingParams  # noqa: E402

# Of torch, wherever a sparse tensor is made, which is what PEFT does.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

NAMES = ["boft", "road", "road-4", "randlora", "shira", "waveft", "lora"]


def recipes() -> dict:
    """Name -> (PEFT config, how much its numbers are moved)."""
    every = {"target_modules": tenants.EVERY}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "boft": (BOFTConfig(boft_block_size=2, boft_n_butterfly_factor=2, **every), 0.2),
            "road": (RoadConfig(group_size=8, **every), 0.1),
            "road-4": (
                RoadConfig(variant="road_4", group_size=4, target_modules=["v_proj", "down_proj"]),
                0.2,
            ),
            "randlora": (RandLoraConfig(r=20, randlora_alpha=20, sparse=True, **every), 0.05),
            "shira": (ShiraConfig(r=2, random_seed=1, **every), 0.1),
            "waveft": (WaveFTConfig(n_frequency=90, scaling=1.0, **every), 0.3),
            "lora": (LoraConfig(r=5, lora_alpha=9, **every), 0.1),
        }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("extended")
    base_model(tenants.BASE).save_pretrained(root / "base")
    for seed, (name, (config, scale)) in enumerate(recipes().items()):
        save_adapter(config, tenants.BASE, root / name, seed=seed, scale=scale)
    return {name: root / name for name in ["base", *NAMES]}


@pytest.fixture(scope="module")
def scored(folders):
    """Every tenant and the base, all in one batch."""
    engine = make_engine(folders, max_adapters=len(NAMES))
    rng = np.random.default_rng(0)
    requests = [
        Request(
            prompt_token_ids=prompt(rng, length),
            adapter=name,
            sampling=SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0, prompt_logprobs=0),
        )
        for length, name in zip(range(30, 70, 5), [None, *NAMES], strict=True)
    ]
    return list(zip(requests, engine.generate(requests), strict=True))


@pytest.mark.parametrize("name", [None, *NAMES])
def test_log_probabilities_and_text_are_those_of_peft(name, scored, folders):
    base = tenants.oracle(None)
    model = base if name is None else tenants.oracle(folders[name])
    for request, completion in (pair for pair in scored if pair[0].adapter == name):
        ids = [*request.prompt_token_ids, *completion.token_ids]
        plain = None if name is None else tenants.next_logprobs(base, ids)
        expected = tenants.next_logprobs(model, ids)
        tenants.check_scores(completion, expected, plain, amplified=0.1)
        greedy = tenants.greedy(model, list(request.prompt_token_ids), 5)
        assert list(completion.token_ids) == greedy


def test_the_stand_in_makes_two_factors(folders):
    layer = tenants.oracle(folders["boft"]).base_model.model.model.layers[0].mlp.up_proj
    assert layer.boft_R["default"].shape[0] == 2
    assert not torch.equal(layer.boft_P[1], torch.eye(len(layer.boft_P[1])))
