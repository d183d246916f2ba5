"""Any adapter as a LoRA: what PEFT makes of it is what PEFT makes of the original."""

from pathlib import Path

import numpy as np
import pytest
from forms import apply_over
from peft_oracle import (
    ROWS,
    compare,
    layer_output,
    load_with_peft,
    peft,
    quiet,
    save_adapter,
    torch,
)
from tiny_checkpoints import CONFIGS, base_output, projections, random_params

from scute_jax import Adapter, AdapterError, NormalForm, Term, stack
from scute_jax.convert import convert_to_lora
from scute_jax.normal_form import Blocks, TokenRows
from scute_jax.peft import load_peft, save_peft

BASE, MODULES = "biased", ["q_proj", "v_proj", "up_proj", "down_proj"]
CONFIG, PARAMS = CONFIGS[BASE], random_params(BASE)
FULL = 48  # the shorter side of every module of this base is at most this

MADE = {
    "lora": lambda: peft.LoraConfig(r=3, target_modules=MODULES),
    "lora with biases": lambda: peft.LoraConfig(
        r=3, target_modules=MODULES, lora_bias=True, bias="all"
    ),
    "dora": lambda: peft.LoraConfig(r=3, target_modules=MODULES, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=MODULES, feedforward_modules=["down_proj"]),
    "vera": lambda: quiet(peft.VeraConfig, r=6, target_modules=MODULES),
    "oft": lambda: quiet(peft.OFTConfig, oft_block_size=4, r=0, target_modules=MODULES),
    "boft": lambda: quiet(peft.BOFTConfig, boft_block_size=4, target_modules=MODULES),
    "beft": lambda: peft.BeftConfig(target_modules=MODULES),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=MODULES),
    "randlora": lambda: quiet(peft.RandLoraConfig, r=4, target_modules=["k_proj"]),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=9, target_modules=MODULES),
}


def loaded(name: str, tmp_path: Path, scale: float = 0.2) -> tuple[Adapter, Path]:
    folder = save_adapter(MADE[name](), BASE, tmp_path / name.replace(" ", "-"), scale=scale)
    return load_peft(folder, CONFIG, PARAMS), folder


@pytest.mark.parametrize("name", MADE)
def test_at_full_rank_peft_runs_the_lora_as_the_original(name: str, tmp_path: Path):
    adapter, _ = loaded(name, tmp_path, 0.1 if "oft" in name else 0.2)
    lora, report = convert_to_lora(adapter, CONFIG, PARAMS, FULL)
    assert report.share < 1e-12 and all(site.share < 1e-12 for site in report.sites)
    save_peft(lora, tmp_path / "lora")
    compare(adapter, tmp_path / "lora", BASE, 2e-5)
    assert {s.site for s in report.sites if s.shifted} == {
        site for site, form in lora.sites.items() if form.b is not None
    }


@pytest.mark.parametrize("name", ["dora", "ia3", "oft", "boft"])
def test_at_a_low_rank_the_report_says_what_peft_leaves_out(name: str, tmp_path: Path):
    """The error of PEFT with the LoRA, measured at each layer on x = I, is that of the report."""
    adapter, folder = loaded(name, tmp_path, 0.1 if "oft" in name else 0.2)
    lora, report = convert_to_lora(adapter, CONFIG, PARAMS, 5)
    save_peft(lora, tmp_path / "lora")
    compare(lora, tmp_path / "lora", BASE, 2e-5)
    ours, theirs = (load_with_peft(path, BASE) for path in (tmp_path / "lora", folder))
    by_site = {site.site: site for site in report.sites}
    assert len(by_site) == len(adapter)
    for p in projections(BASE):
        if p.site not in by_site:
            continue
        eye = np.concatenate([np.eye(p.d_in), np.zeros((1, p.d_in))]).astype(np.float32)
        exact, approximate = (layer_output(model, p.module, eye) for model in (theirs, ours))
        plain = base_output(PARAMS, p.module)(np.float64(eye))
        D = (exact - plain)[:-1] - (exact - plain)[-1]
        off = (exact - approximate)[:-1] - (exact - approximate)[-1]
        site = by_site[p.site]
        np.testing.assert_allclose(site.share, (off**2).sum() / (D**2).sum(), rtol=1e-3)
        np.testing.assert_allclose(site.squared_norm, (D**2).sum(), rtol=1e-4)
        s = np.linalg.svd(D, compute_uv=False) ** 2
        np.testing.assert_allclose(site.share, s[5:].sum() / s.sum(), rtol=1e-3)
        assert site.rank == 5 and site.share > 0.01
        np.testing.assert_allclose(exact[-1], approximate[-1], atol=1e-4)  # the shift is exact
    whole = sum(s.share * s.squared_norm for s in report.sites)
    assert report.share == whole / sum(s.squared_norm for s in report.sites)


def test_a_lora_of_the_rank_comes_back_at_its_own_rank(tmp_path: Path):
    adapter, _ = loaded("lora", tmp_path)
    lora, report = convert_to_lora(adapter, CONFIG, PARAMS, 8)
    assert {form.rank for form in lora.sites.values()} == {3}
    assert {site.weighted_share for site in report.sites} == {None}
    for site, form in adapter.sites.items():
        ours, theirs = (f.terms[0].A @ f.terms[0].B for f in (lora[site], form))
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    again, _ = convert_to_lora(adapter, CONFIG, PARAMS, 8)
    other, _ = convert_to_lora(adapter, CONFIG, PARAMS, 2)
    assert again.version == lora.version != other.version


def test_moments_weigh_the_error_and_seen_sites_are_called(tmp_path: Path):
    adapter, _ = loaded("oft", tmp_path, 0.1)
    rng = np.random.default_rng(0)
    widths = {p.site: p.d_in for p in projections(BASE)}
    data = {
        site: rng.normal(size=(200, d)) * np.geomspace(1, 0.05, d) for site, d in widths.items()
    }
    moments = {site: x.T @ x / len(x) for site, x in data.items()}
    seen = []
    lora, report = convert_to_lora(
        adapter, CONFIG, PARAMS, 4, moments=moments.get, on_site=lambda *found: seen.append(found)
    )
    plain, plain_report = convert_to_lora(adapter, CONFIG, PARAMS, 4)
    assert [site for site, _, _ in seen] == list(adapter.sites)
    for (site, delta, found), row in zip(seen, report.sites, strict=True):
        x, D = data[site], delta.matrix()

        def left(form: NormalForm, x=x, D=D) -> float:
            error = x @ (D - np.float64(form.terms[0].A) @ np.float64(form.terms[0].B))
            return (error**2).sum() / ((x @ D) ** 2).sum()

        assert found.weighted_share == row.weighted_share
        np.testing.assert_allclose(left(lora[site]), row.weighted_share, rtol=0.1)
        assert left(lora[site]) < 0.8 * left(plain[site])
    assert plain_report.share < report.share


def test_stacks_and_rotations_of_the_output_are_converted_too(tmp_path: Path):
    rng, (lora, _) = np.random.default_rng(0), loaded("lora", tmp_path)
    turned = {}
    for p in projections(BASE):
        if p.site in lora:
            values = np.eye(4) + 0.3 * rng.normal(size=(p.d_out // 4, 4, 4))
            blocks = Blocks(values.astype(np.float32), rng.permutation(p.d_out), "some order")
            turned[p.site] = NormalForm(Q=(blocks,))
    both = stack(lora, Adapter(turned, "TURN", "0"))
    found, _ = convert_to_lora(both, CONFIG, PARAMS, FULL)
    save_peft(found, tmp_path / "both")
    compare(both, tmp_path / "both", BASE, 2e-5)


def test_norms_move_into_the_projections_behind_them(tmp_path: Path):
    """y * s + b of a norm, then the projection: PEFT with the LoRA gets the same from y."""
    rng = np.random.default_rng(0)
    s, b = (rng.normal(size=48).astype(np.float32) for _ in range(2))
    sites = {"layers.1.input_layernorm": NormalForm(s=1 + s), "norm": NormalForm(b=b)}
    sites["layers.1.post_attention_layernorm"] = NormalForm(s=1 + s, b=b)
    query = Term(*(rng.normal(size=n).astype(np.float32) for n in ((48, 2), (2, 72))))
    sites["layers.1.self_attn.q_proj"] = NormalForm(terms=(query,))
    lora, _ = convert_to_lora(Adapter(sites, "LN_TUNING", "0"), CONFIG, PARAMS, FULL)
    save_peft(lora, tmp_path)
    model = load_with_peft(tmp_path, BASE)
    read = {"input_layernorm": "qkv", "post_attention_layernorm": ("gate", "up")}
    readers = {
        f"layers.1.{'mlp' if len(name) > 1 else 'self_attn'}.{name}_proj": f"layers.1.{norm}"
        for norm, names in read.items()
        for name in names
    } | {"lm_head": "norm"}
    assert set(lora.sites) == set(readers)
    y = rng.normal(size=(ROWS, 48)).astype(np.float32)
    for p in projections(BASE):
        if p.site in readers:
            norm = sites[readers[p.site]]
            seen = y * (1 if norm.s is None else norm.s) + (0 if norm.b is None else norm.b)
            form = sites.get(p.site, NormalForm())
            expected = apply_over(form, base_output(PARAMS, p.module), np.float64(seen))
            np.testing.assert_allclose(layer_output(model, p.module, y), expected, atol=2e-4)


@pytest.mark.parametrize("name", ["biased", "tied"])
def test_replaced_tokens_and_a_shifted_embedding(name: str, tmp_path: Path):
    rng, params = np.random.default_rng(0), random_params(name)
    rows = TokenRows(np.array([5, 96]), rng.normal(size=(2, 48)).astype(np.float32))
    sites = {"embed_tokens": NormalForm(b=np.ones(48, np.float32), rows=rows)}
    sites["lm_head"] = NormalForm(rows=rows)
    lora, report = convert_to_lora(
        Adapter(sites, "TRAINABLE_TOKENS", "0"), CONFIGS[name], params, 3
    )
    assert [site.rank for site in report.sites] == [3, 2]
    save_peft(lora, tmp_path)
    model = load_with_peft(tmp_path, name).base_model.model
    expected = params["model.embed_tokens.weight"] + 1
    expected[rows.ids] = rows.rows
    found = model.get_submodule("model.embed_tokens")(torch.arange(97)).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    head = model.get_submodule("lm_head")(torch.eye(48)).detach().numpy().T
    expected = params["lm_head.weight"].copy()
    expected[rows.ids] = rows.rows
    np.testing.assert_allclose(head, expected, atol=1e-5)


def test_what_cannot_be_converted_is_refused(tmp_path: Path):
    site = "layers.0.self_attn.q_proj"
    nothing = Adapter({site: NormalForm(s=np.ones(72, np.float32))}, "IA3", "0")
    with pytest.raises(AdapterError, match="this IA3 adapter changes nothing"):
        convert_to_lora(nothing, CONFIG, PARAMS, 4)
    with pytest.raises(ValueError, match="the rank of a LoRA is 0"):
        convert_to_lora(nothing, CONFIG, PARAMS, 0)
    with pytest.raises(AdapterError, match="q_proj: the base's own weight is needed"):
        convert_to_lora(nothing, CONFIG, None, 4)
    shift = NormalForm(b=np.ones(48, np.float32))
    with pytest.raises(AdapterError, match="layers.2.input_layernorm: the base has no such module"):
        convert_to_lora(Adapter({"layers.2.input_layernorm": shift}, "X", "0"), CONFIG, PARAMS, 4)
    more = TokenRows(np.array([97]), np.ones((1, 48), np.float32))
    with pytest.raises(AdapterError, match="lm_head: it adds tokens"):
        convert_to_lora(Adapter({"lm_head": NormalForm(rows=more)}, "X", "0"), CONFIG, PARAMS, 4)
    turned = NormalForm(Q=(Blocks(np.ones((24, 2, 2), np.float32)),))
    with pytest.raises(AdapterError, match="layers.0.input_layernorm: it changes a norm by more"):
        convert_to_lora(Adapter({"layers.0.input_layernorm": turned}, "X", "0"), CONFIG, PARAMS, 4)
