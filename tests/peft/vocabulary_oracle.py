"""Embedding, head and norms of an adapter against PEFT's own, module by module.

folder = checkpoint(config, "tied", tmp_path, tokens=[3, 5]); adapter = check(folder, "tied")
"""

import warnings
from pathlib import Path

import numpy as np
from peft_oracle import base_model, load_with_peft, peft, torch
from tiny_checkpoints import CONFIGS, random_params

from scute_jax import Adapter, NormalForm
from scute_jax.peft import load_peft
from scute_jax.peft.base import Base

VOCAB, HIDDEN = 97, 48
SHARE = 1e-5  # of the adapter's effect


def checkpoint(config, name, folder: Path, seed=0, tokens=None, added=0, **save) -> Path:
    """What PEFT saves; of modules that are trained whole, only these tokens are moved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = base_model(name)
        if added:
            model.resize_token_embeddings(VOCAB + added, mean_resizing=False)
        model = peft.get_peft_model(model, config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.requires_grad:
                    noise = 0.3 * torch.randn(parameter.shape)
                    if "modules_to_save" in key and parameter.ndim == 2:
                        kept = torch.zeros(len(parameter), 1)
                        kept[list(tokens)] = 1
                        noise = noise * kept
                    parameter.add_(noise)
        model.save_pretrained(folder, **save)
    return folder


def loaded(folder: Path, name: str) -> Adapter:
    return load_peft(folder, CONFIGS[name], random_params(name))


def check(folder: Path, name: str, added: int = 0, needs_effect: bool = True) -> Adapter:
    """The adapter, after `compare_vocabulary`."""
    adapter = loaded(folder, name)
    compare_vocabulary(adapter, folder, name, added, needs_effect)
    return adapter


def compare_vocabulary(
    adapter: Adapter,
    folder: Path,
    name: str,
    added: int = 0,
    needs_effect: bool = True,
    share: float = SHARE,
) -> None:
    """Asserts that embedding (for every token), head and norms are those of PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if added:
            model = base_model(name)
            model.resize_token_embeddings(VOCAB + added, mean_resizing=False)
            model = peft.PeftModel.from_pretrained(model, str(folder)).eval()
        else:
            model = load_with_peft(folder, name)
    base, params = Base.from_config(CONFIGS[name]), random_params(name)
    x = np.random.default_rng(5).normal(size=(6, HIDDEN)).astype(np.float32)
    inner = model.base_model.model

    def theirs(module, rows):
        with torch.no_grad():
            return inner.get_submodule(module)(rows[None])[0].double().numpy()

    E, W = params["model.embed_tokens.weight"], params["lm_head.weight"].T
    tokens = torch.arange(base.vocab + added)
    pairs = [
        (_embedding(adapter, np.float64(E), added), theirs("model.embed_tokens", tokens), E),
        (
            _head(adapter, np.float64(W), np.float64(x), added),
            theirs("lm_head", torch.tensor(x)),
            x @ W,
        ),
    ]
    normal = x / np.sqrt((np.float64(x) ** 2).mean(-1, keepdims=True) + 1e-6)
    for norm in base.norms:
        weight = np.float64(params[f"{norm.module}.weight"])
        form = adapter.sites.get(norm.site, NormalForm())
        ours = normal * own_weight(form, weight)
        pairs.append((ours, theirs(norm.module, torch.tensor(x)), normal * weight))
    effects = []
    for ours, their, plain in pairs:
        assert ours.shape == their.shape
        old = tuple(slice(n) for n in plain.shape)
        effects.append(np.linalg.norm(their[old] - plain) + added * np.linalg.norm(their))
        bound = share * effects[-1] + 1e-6 * np.linalg.norm(their)
        error = np.linalg.norm(ours - their)
        assert error <= bound, f"error {error:.2e} of an effect of {effects[-1]:.2e}"
    assert max(effects) > 1 or not needs_effect


def own_weight(form: NormalForm, base: np.ndarray) -> np.ndarray:
    """The weight of a norm that acts as the form over one with the weight `base`."""
    weight = base * (1 if form.s is None else np.float64(form.s))
    if form.S is not None:
        np.testing.assert_array_equal(form.S.rows, form.S.cols)
        weight[form.S.rows] += form.S.values
    return weight


def _embedding(adapter: Adapter, E: np.ndarray, added: int) -> np.ndarray:
    form, (vocab, hidden) = adapter.sites.get("embed_tokens", NormalForm()), E.shape
    y = np.concatenate([E * (1 if form.s is None else form.s), np.full((added, hidden), np.nan)])
    for term in form.terms:
        y[:vocab] += np.float64(term.A) @ np.float64(term.B)
    if form.rows is not None:
        y[form.rows.ids] = form.rows.rows
    return y


def _head(adapter: Adapter, W: np.ndarray, x: np.ndarray, added: int) -> np.ndarray:
    form, vocab = adapter.sites.get("lm_head", NormalForm()), W.shape[1]
    y = x @ W * (1 if form.s is None else np.float64(form.s))
    y = np.concatenate([y, np.full((len(x), added), np.nan)], 1)
    for term in form.terms:
        y[:, :vocab] += x @ np.float64(term.A) @ np.float64(term.B)
    if form.rows is not None:
        y[:, form.rows.ids] = x @ np.float64(form.rows.rows).T
    return y
