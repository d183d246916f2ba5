"""Norms, embedding, head and tokens of several tenants in one batch, against the PEFT library."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle is the PEFT library, which needs torch")

import vocabulary_tenants as tenants  # noqa: E402
from engines import make_engine  # noqa: E402
from tenants import check_scores, greedy, next_logprobs  # noqa: E402

from scute_jax.entries import kinds  # noqa: E402
from scute_jax.models.adapters import for_llama, route  # noqa: E402
from scute_jax.peft import load_peft  # noqa: E402
from scute_jax.serving import Request, SamplingParams  # noqa: E402
from scute_jax.serving.sampling import SamplingRows, sample, score  # noqa: E402

COUNT = 12
ADDED = range(tenants.VOCAB, tenants.VOCAB + tenants.ADDED)


@pytest.fixture(scope="module", params=["plain", "tied"])
def served(request, tmp_path_factory):
    """The base's name, the folders, the engine, and every tenant's request with its completion."""
    folders = tenants.build(tmp_path_factory.mktemp(request.param), request.param)
    engine = make_engine(folders)
    rng, requests = np.random.default_rng(0), []
    for tenant in [None, *folders]:
        if tenant != "base":
            prompt = rng.integers(3, tenants.VOCAB, 40).tolist()
            prompt[5:20:3] = [*tenants.TOKENS[:5]]
            if tenant == "added":
                prompt[1:30:7] = [*ADDED, ADDED[0]]
            sampling = SamplingParams(
                max_tokens=COUNT, ignore_eos=True, logprobs=0, prompt_logprobs=0
            )
            requests.append(Request(prompt_token_ids=prompt, adapter=tenant, sampling=sampling))
    done = engine.generate(requests)
    return request.param, folders, engine, list(zip(requests, done, strict=True))


def test_log_probabilities_and_text_of_a_mixed_batch(served):
    name, folders, _, scored = served
    base = tenants.oracle(folders, name, None)
    for request, completion in scored:
        model = tenants.oracle(folders, name, request.adapter)
        ids = [*request.prompt_token_ids, *completion.token_ids]
        plain = None
        if request.adapter is not None:
            plain = next_logprobs(base, [min(i, tenants.VOCAB - 1) for i in ids])
        check_scores(completion, next_logprobs(model, ids), plain, amplified=0.05)
        expected = greedy(model, list(request.prompt_token_ids), COUNT)
        assert list(completion.token_ids) == expected, request.adapter


def test_a_stack_of_norms_tokens_and_a_lora(served):
    name, folders, engine, scored = served
    prompt = scored[0][0].prompt_token_ids
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    names = ["norms", "trained tokens", "lora"]
    (done,) = engine.generate([Request(prompt_token_ids=prompt, adapter=names, sampling=sampling)])
    model = tenants.merged(folders, name, names)
    ours = np.array([*done.prompt_logprobs[1:], *done.logprobs])
    expected = next_logprobs(model, [*prompt, *done.token_ids])
    assert np.abs(ours - expected).mean() <= 1e-5


def test_added_tokens_are_generated_by_their_tenant_only(served):
    _, _, _, scored = served
    for request, completion in scored:
        generated = set(completion.token_ids) & set(ADDED)
        assert bool(generated) == (request.adapter == "added")


def test_added_tokens_are_refused_to_others(served):
    _, _, engine, _ = served
    for tenant, top in ((None, 96), ("norms", 96), ("added", 100)):
        request = Request(prompt_token_ids=[5, top + 1], adapter=tenant)
        (completion,) = engine.generate([request])
        assert f"holds {top + 1}; ids run from 0 to {top}" in completion.error


def test_columns_of_nobody_change_no_draw():
    """The tokens that others add stand behind the vocabulary with a logit of -inf."""
    rng, rows = np.random.default_rng(2), 40
    logits = 3 * rng.normal(size=(rows, 97)).astype(np.float32)
    wide = np.pad(logits, ((0, 0), (0, 4)), constant_values=-np.inf)
    sampling = SamplingRows(
        temperature=rng.choice([0.0, 0.7, 1.0, 3.0], rows).astype(np.float32),
        top_p=rng.choice([0.3, 0.9, 1.0], rows).astype(np.float32),
        top_k=rng.choice([0, 1, 5], rows).astype(np.int32),
        seed=rng.integers(0, 99, rows).astype(np.uint32),
    )
    position = np.arange(rows, dtype=np.int32)
    draws = [np.asarray(sample(own, sampling, position)) for own in (logits, wide)]
    np.testing.assert_array_equal(*draws)
    assert len(set(draws[0].tolist())) > 10
    scores = [score(own, draws[0], 5) for own in (logits, wide)]
    np.testing.assert_allclose(scores[0].logprob, scores[1].logprob, atol=1e-6)
    np.testing.assert_array_equal(scores[0].top_token, scores[1].top_token)


def test_a_batch_pays_for_norms_and_vocabulary_only_where_they_are_adapted(served):
    _, folders, engine, _ = served

    def sites(tenant):
        adapter = for_llama(load_peft(folders[tenant], engine.config, engine.params))
        routes = {route(site, kind) for site, f in adapter.sites.items() for kind in kinds(f)}
        return set(engine._residency.slots(frozenset(routes)))

    projections = {f"layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"}
    assert sites("lora") == projections
    norms = {f"layers.{i}.{n}" for i in (0, 1) for n in tenants.NORMS[:2]} | {"norm"}
    assert sites("norms") == norms
    assert sites("dora") == {"embed_tokens", "lm_head"}
    assert {"norm"} < sites("saved norm") - projections <= norms
