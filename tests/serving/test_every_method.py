"""Every method that is served, resident at once in one engine, in one batch with the base.

Norms and replaced tokens among them; each is held to the PEFT library by its log-probabilities.
"""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle is the PEFT library, which needs torch")

import tenants  # noqa: E402
from boft_extension import with_extension  # noqa: E402, F401
from engines import make_engine  # noqa: E402
from members import (  # noqa: E402
    CONFIGS_OF,
    ELSEWHERE,
    INVOCATION,
    TOKENS,
    load_member,
    prepare_member,
    save_member,
)
from peft_oracle import base_model, load_with_peft  # noqa: E402
from test_exactness import prompt  # noqa: E402
from tiny_checkpoints import CONFIGS, random_params  # noqa: E402

from scute_jax.serving import Request, SamplingParams  # noqa: E402

# Of torch, wherever a sparse tensor is made, which is what PEFT does.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

BASE, MODULES = tenants.BASE, ["down_proj"]
NAMES = [*CONFIGS_OF, *ELSEWHERE]
SCALES = {"DEFT": 0.1, "HRA": 0.1, "POLY": 1.0, "WAVEFT": 0.1}  # how much numbers are moved


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Name -> its folder, request and completion."""
    root, rng = tmp_path_factory.mktemp("every"), np.random.default_rng(0)
    base_model(BASE).save_pretrained(root / "base")
    engine = make_engine({"base": root / "base"}, max_adapters=len(NAMES))
    for name in NAMES:
        save_member(name, BASE, root / name, MODULES, SCALES.get(name, 0.3))
        adapter = load_member(name, root / name, CONFIGS[BASE], random_params(BASE))
        engine.add_adapter(name, adapter)
    requests = [
        Request(
            prompt_token_ids=[*INVOCATION, *prompt(rng, 10), *TOKENS, *prompt(rng, 5)],
            adapter=name,
            sampling=SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=0),
        )
        for name in [None, *NAMES]
    ]
    answered = zip(requests, engine.generate(requests), strict=True)
    return {r.adapter: (root / (r.adapter or "base"), r, c) for r, c in answered}


@pytest.mark.parametrize("name", [None, *NAMES])
def test_log_probabilities_are_those_of_peft(name, scored):
    folder, request, completion = scored[name]
    base = base_model(BASE)
    model = base if name is None else load_with_peft(folder, BASE)
    prepare_member(name, model)
    ids = [*request.prompt_token_ids, *completion.token_ids]
    expected = tenants.next_logprobs(model, ids)
    plain = None if name is None else tenants.next_logprobs(base, ids)
    tenants.check_scores(completion, expected, plain, amplified=0.02)
