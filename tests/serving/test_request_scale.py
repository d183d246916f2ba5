"""A scale per request: the effect of an adapter made weaker or stronger, without a copy of it."""

import numpy as np
import pytest
from lora_engine import ask, lora, new_engine, tokens

from scute_jax import Adapter, NormalForm
from scute_jax.identity import content_version
from scute_jax.scale import scaled
from scute_jax.serving import Request, RequestError


def made(adapters):
    engine = new_engine(max_adapters=4)
    for name, adapter in adapters.items():
        engine.add_adapter(name, adapter)
    return engine


def scores(engine, *requests):
    completions = engine.generate(requests)
    tokens(completions)
    return [np.array(c.prompt_logprobs[1:]) for c in completions]


def asked(adapter=None, **more):
    return ask(adapter, 40, 2, prompt_logprobs=0, **more)


def test_a_scaled_request_is_the_adapter_scaled():
    ours = made({"a": lora(0), "b": lora(1)})
    theirs = made({"half": scaled(lora(0), 0.5), "twice": scaled(lora(1), 2.0)})
    mixed = scores(
        ours,
        asked("a", scale=0.5),
        asked("a"),
        asked("b", scale=2),
        asked(["a", "b"], scale=[0.5, 2]),
        asked("a", scale=0),
        asked(),
    )
    half, twice, both = scores(theirs, asked("half"), asked("twice"), asked(["half", "twice"]))
    np.testing.assert_allclose(mixed[0], half, atol=1e-5)
    np.testing.assert_allclose(mixed[2], twice, atol=1e-5)
    np.testing.assert_allclose(mixed[3], both, atol=1e-5)
    np.testing.assert_array_equal(mixed[4], mixed[5])
    assert np.abs(mixed[0] - mixed[1]).mean() > 0.1, "the scale has no effect"


def test_the_same_prompt_at_another_scale_shares_no_page():
    engine = made({"a": lora(0)})
    plain, half = ask("a", 64, 8), ask("a", 64, 8, scale=0.5)
    expected = tokens(made({"a": lora(0)}).generate([half]))
    tokens(engine.generate([plain]))
    assert tokens(engine.generate([half])) == expected
    assert tokens(engine.generate([plain, half, plain]))[1:2] == expected


def test_a_scale_leaves_the_device_with_its_adapter():
    engine = made({"a": lora(0)})
    tokens(engine.generate([ask("a"), ask("a", scale=0.5), ask("a", scale=0.25)]))
    assert engine.stats().slots_used == 3
    engine.remove_adapter("a")
    assert engine.stats().slots_used == 0


def test_a_scale_that_the_method_does_not_allow_fails_alone():
    R = np.stack([np.array([[0, 1], [-1, 0]], np.float32)] * 24)
    sites = {"layers.0.self_attn.q_proj": NormalForm(R=R, s=np.full(72, 2, np.float32))}
    product = Adapter(sites, "BOFT", content_version(["product"]))
    engine = made({"a": lora(0), "product": product})
    bad, good, zero = engine.generate(
        [ask("product", scale=0.5), ask("a", scale=0.5), ask("product", scale=0)]
    )
    assert bad.finish_reason == "error" and "is a product (R s)" in bad.error
    assert good.error is None and zero.error is None
    assert [zero.token_ids] == tokens(engine.generate([ask()]))


def test_a_scale_beyond_float32_is_refused():
    engine = made({"a": lora(0)})
    (completion,) = engine.generate([ask("a", scale=1e39)])
    assert completion.finish_reason == "error" and "not finite" in completion.error


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"adapter": "a", "scale": "0.5"}, "scale must be a finite number"),
        ({"adapter": "a", "scale": True}, "scale must be a finite number"),
        ({"adapter": "a", "scale": float("nan")}, "scale must be a finite number"),
        ({"adapter": "a", "scale": None}, "scale must be a finite number"),
        ({"scale": 0.5}, "scale needs an adapter"),
        ({"adapter": ["a", "b"], "scale": [1.0]}, "1 numbers, but the request names 2 adapters"),
        ({"adapter": "a", "scale": [1.0, 2.0]}, "2 numbers, but the request names 1 adapters"),
    ],
)
def test_what_is_no_scale_says_so(fields, message):
    with pytest.raises(RequestError, match=message):
        Request(prompt="x", **fields)
