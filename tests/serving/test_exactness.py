"""One mixed batch against the PEFT library: log-probabilities, long positions, greedy text."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle is the PEFT library, which needs torch")

import tenants  # noqa: E402

from scute_jax.serving import Request, SamplingParams  # noqa: E402

TENANTS = [None, *tenants.NAMES]
LONG = 1600


def prompt(rng, length):
    return rng.integers(3, 97, length).tolist()


@pytest.fixture(scope="module")
def scored(engine):
    """Every tenant with a short and a long prompt, all in one batch."""
    rng = np.random.default_rng(0)
    requests = [
        Request(
            prompt_token_ids=prompt(rng, length),
            adapter=name,
            sampling=SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0),
        )
        for name in TENANTS
        for length in (37, LONG)
    ]
    return list(zip(requests, engine.generate(requests), strict=True))


@pytest.mark.parametrize("name", TENANTS)
def test_log_probabilities_of_a_mixed_batch(name, scored, folders):
    base = tenants.oracle(None)
    model = base if name is None else tenants.oracle(folders[name])
    for request, completion in scored:
        if request.adapter != name:
            continue
        ids = [*request.prompt_token_ids, *completion.token_ids]
        expected = tenants.next_logprobs(model, ids)
        plain = None if name is None else tenants.next_logprobs(base, ids)
        since = (0, 1500) if len(ids) > 1500 else (0,)
        tenants.check_scores(completion, expected, plain, amplified=0.1, since=since)


@pytest.mark.parametrize("name", TENANTS)
def test_greedy_text_of_a_mixed_batch(name, scored, folders):
    model = tenants.oracle(None if name is None else folders[name])
    for request, completion in scored:
        if request.adapter == name and len(request.prompt_token_ids) < 100:
            expected = tenants.greedy(model, list(request.prompt_token_ids), 12)
            assert list(completion.token_ids) == expected
