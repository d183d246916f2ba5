"""Log-probabilities and second moments over a text, against a plain pass of transformers."""

import json

import numpy as np
import pytest
from tiny_checkpoints import CONFIGS, projections, random_params

pytest.importorskip("torch", reason="the oracle is transformers, which needs torch")

from files import model_folder  # noqa: E402
from peft_oracle import base_model, torch  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from scute_jax.models import observe  # noqa: E402
from scute_jax.models.checkpoint import load_model  # noqa: E402
from scute_jax.models.config import LlamaConfig  # noqa: E402
from scute_jax.models.merge import with_delta  # noqa: E402
from scute_jax.models.params import LlamaParams  # noqa: E402

TEXTS = [list(range(3, 40)), [5], [7, 8, 9] * 9]


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(observe, "WINDOW", 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[LlamaConfig, LlamaParams]:
    return load_model(model_folder(tmp_path_factory.mktemp("observe") / "base", False), "float32")


def windows_of_texts() -> list[list[int]]:
    cut = [text[i : i + 16] for text in TEXTS for i in range(0, len(text), 16)]
    return [ids for ids in cut if len(ids) > 1]


def logprobs(model: PreTrainedModel) -> np.ndarray:
    found = []
    with torch.no_grad():
        for ids in windows_of_texts():
            scores = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
            found.append(scores.log_softmax(-1)[np.arange(len(ids) - 1), ids[1:]].numpy())
    return np.concatenate(found)


def test_windows_hold_every_text_once_and_no_more_than_is_asked():
    held = observe.windows(TEXTS)
    assert [row[row >= 0].tolist() for row in held] == windows_of_texts()
    assert held.shape[1] == 16 and (held >= -1).all()
    assert (observe.windows(TEXTS, 40) >= 0).sum() == 37
    assert observe.windows([[1]]).shape == (0, 16)
    assert observe.num_steps(held) == len(list(observe.steps(held))) == 3


def test_log_probabilities_are_those_of_transformers(model):
    config, params = model
    counted = []
    held = observe.windows(TEXTS)
    found = observe.token_logprobs(params, config, held, lambda: counted.append(1))
    np.testing.assert_allclose(found, logprobs(base_model("plain")), atol=2e-5)
    assert len(counted) == observe.num_steps(held)


def test_moments_are_those_of_what_the_modules_read(model):
    config, params = model
    twin, rows, hooks = base_model("plain"), {}, []
    for p in projections("plain"):

        def keep(_module, inputs, site=p.site):
            rows.setdefault(site, []).append(inputs[0][0].double().numpy())

        hooks.append(twin.get_submodule(p.module).register_forward_pre_hook(keep))
    with torch.no_grad():
        for ids in windows_of_texts():
            twin(input_ids=torch.tensor([ids]))
    sites = ("embed_tokens", *rows)
    found = observe.second_moments(params, config, observe.windows(TEXTS), sites)
    assert found.keys() == set(sites)
    for site, parts in rows.items():
        x = np.concatenate(parts)
        expected = x.T @ x / len(x)
        np.testing.assert_allclose(found[site], expected, atol=1e-4 * np.abs(expected).max())
    assert found["layers.1.mlp.up_proj"] is found["layers.1.mlp.gate_proj"]
    ids = np.concatenate([np.array(w) for w in windows_of_texts()])
    np.testing.assert_allclose(found["embed_tokens"], np.bincount(ids, minlength=97) / len(ids))


@pytest.mark.parametrize("name", ["plain", "tied", "biased"])
def test_a_merged_model_is_one_whose_weights_were_changed(name: str, tmp_path):
    config = CONFIGS[name] | {"max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = dict(random_params(name))
    if name == "tied":
        del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    config, params = load_model(tmp_path, "float32")
    rng, twin = np.random.default_rng(0), base_model(name)
    twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.clone())
    modules = {"embed_tokens": "model.embed_tokens", "layers.1.mlp.up_proj": None, "lm_head": None}
    for site, module in modules.items():
        layer = twin.get_submodule(module or (site if site == "lm_head" else f"model.{site}"))
        shape = layer.weight.shape if module else layer.weight.T.shape
        D = 0.3 * rng.normal(size=shape)
        shift = None if site == "embed_tokens" else rng.normal(size=shape[1])
        params = with_delta(params, site, D, shift)
        with torch.no_grad():
            layer.weight += torch.tensor(D if module else D.T, dtype=torch.float32)
            if shift is not None:
                bias = torch.zeros(shape[1]) if layer.bias is None else layer.bias
                layer.bias = torch.nn.Parameter(bias + torch.tensor(shift, dtype=torch.float32))
    found = observe.token_logprobs(params, config, observe.windows(TEXTS))
    np.testing.assert_allclose(found, logprobs(twin), atol=5e-5)
