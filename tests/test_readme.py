"""What the README says is so: its table is that of the registry, and its code runs."""

import re
from pathlib import Path

import numpy as np
import pytest
from forms import evaluate, random_blocks, random_form, random_sparse, random_term
from tiny_checkpoints import CONFIGS, write

import scute_jax as sj
from scute_jax.normal_form import Kronecker, TokenRows
from scute_jax.peft import registry
from scute_jax.peft.table import with_table

README = Path(__file__).parents[1] / "README.md"


def test_the_table_of_methods_is_that_of_the_registry():
    text = README.read_text()
    assert text == with_table(text), "run: python -m scute_jax.peft.table, and put it in"


@pytest.mark.parametrize("z", [2, 4])
def test_the_table_of_costs_is_the_byte_model(z: int):
    """Three tenants with rows and one without, beside base rows."""
    lines = re.findall(
        r"^\| ([^|`]+) \| `(.+?)` \| `(.+?)` \| `(.+?)` \| `(\d)` \|$", README.read_text(), re.M
    )
    widths = {"d_in": 24, "d_out": 10, "d": 12, "vocab": 40, "r": 3, "k": 5, "all_k": 15}
    widths |= {"m": 2, "n": 5, "p": 12, "q": 2, "z": z}
    cases, rows = priced_slots(**widths), [4, 1, 2, 0, 30]
    assert [slot for slot, *_ in lines] == list(cases)
    for slot, *formulas, launches in lines:
        place, beside, form, once = cases[slot]
        tenant, own, every = (eval(formula, {}, widths) for formula in formulas)
        kind, d_in, d_out = SITES[place]
        without, found = (
            sum(sj.byte_cost(forms, rows, widths[d_in], widths[d_out], z, kind).values(), sj.Cost())
            for forms in ([f] * 4 + [sj.NormalForm()] for f in (beside, form))
        )
        norms = z == 4 and place == "norm"  # nothing to round
        expected = 3 * tenant + 7 * own + 37 * (0 if norms else every) + once
        assert found.bytes - without.bytes == expected, slot
        assert found.launches - without.launches == int(launches) - norms, slot


SITES = {
    "projection": ("projection", "d_in", "d_out"),
    "norm": ("norm", "d", "d"),
    "embedding": ("embedding", "vocab", "d"),
    "head": ("projection", "d", "vocab"),
}


def priced_slots(d_in, d_out, d, vocab, r, k, m, n, p, q, z, **_) -> dict:
    """Slot -> (place, a form without it, a form with it, bytes once for all tenants)."""
    rng, none = np.random.default_rng(0), sj.NormalForm()
    lora = random_form(rng, d_in, d_out, terms=[random_term(rng, d_in, d_out, r)])
    shared, scaled = (
        sj.NormalForm(terms=(random_term(rng, d_in, d_out, r, slots, pair),))
        for pair in [("pair", np.ones((d_in, r)), np.ones((r, d_out)))]
        for slots in ("de", "deu")
    )
    embedded = random_form(rng, vocab, d, terms=[random_term(rng, vocab, d, r)])
    tokens = sj.NormalForm(rows=TokenRows(np.arange(k), np.ones((k, d))))
    return {
        "A, B of its own, rank r": ("projection", none, lora, 0),
        "s or b beside A, B": ("projection", lora, lora.replace(b=np.ones(d_out)), 0),
        "s or b alone": ("projection", none, random_form(rng, d_in, d_out, "s"), 0),
        "d, e on A, B that tenants share": ("projection", none, shared, z * r * (d_in + d_out)),
        "u, with d, e": ("projection", shared, scaled, 0),
        "P or R, of m by m blocks": ("projection", none, random_form(rng, d_in, d_out, "", m), 0),
        "Q, of m by m blocks": (
            "projection", none, sj.NormalForm(Q=(random_blocks(rng, d_out, m, 1),)), 0,
        ),
        "S, of k numbers": (
            "projection", none, sj.NormalForm(S=random_sparse(rng, d_in, d_out, k)), 0,
        ),
        "K, m by n and p by q": (
            "projection", none, sj.NormalForm(K=(Kronecker(np.ones((m, n)), np.ones((p, q))),)), 0,
        ),
        "s or b of a norm": ("norm", none, random_form(rng, d, d, "s"), 0),
        "A, B of the embedding": ("embedding", none, embedded, 0),
        "s or b of the embedding": ("embedding", none, random_form(rng, vocab, d, "b"), 0),
        "rows: k tokens of the embedding": ("embedding", none, tokens, 0),
        "rows: k tokens of the head": ("head", none, tokens, 0),
    }  # fmt: skip


def test_the_first_notebook_cell_runs():
    cell, scope = cell_with("W ="), {}
    exec(cell, scope)
    lora, x = scope["lora"].terms[0], np.ones((1, 64))
    expected = x @ np.asarray(scope["W"]) + 0.5 * x @ lora.A @ lora.B
    np.testing.assert_allclose(scope["y"][0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(scope["y"][2], scope["both"].s * expected[0], rtol=1e-4)


def test_a_method_of_ones_own_takes_twenty_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.chdir(tmp_path)
    rng, module = np.random.default_rng(0), "base_model.model.model.layers.1.self_attn.v_proj"
    tensors = {
        f"{module}.gated_{name}": rng.normal(size=shape).astype(np.float32)
        for name, shape in {"A": (3, 48), "B": (24, 3), "g": (24,)}.items()
    }
    config = {"peft_type": "GATED", "r": 3, "gated_dropout": 0.1}
    names = {"target_modules": ["layers.1.self_attn.v_proj"]}
    folder = write(tmp_path / "path" / "to" / "checkpoint", config | names, tensors)
    cell, scope = cell_with("@register"), {"config": CONFIGS["plain"]}
    assert len(cell.splitlines()) <= 20
    exec(cell, scope)
    exec(cell, scope)  # a cell is run again

    A, B, g = (tensors[f"{module}.gated_{name}"] for name in "ABg")
    W, x = rng.normal(size=(48, 24)).astype(np.float32), rng.normal(size=(5, 48))
    expected = x @ W * (1 + g) + x @ A.T @ B.T / 3
    adapter = scope["adapter"]
    assert adapter.method == "GATED" and adapter.live == ("s",)
    form = adapter["layers.1.self_attn.v_proj"]
    np.testing.assert_allclose(evaluate(form, W, x), expected, atol=1e-4)
    half = sj.scaled(adapter, 0.5)["layers.1.self_attn.v_proj"]
    np.testing.assert_allclose(evaluate(half, W, x), (x @ W + expected) / 2, atol=1e-4)
    y = sj.apply_normal_form(
        sj.site_params(W, [form]), np.float32(x), sj.segments(np.zeros(5, int), 1)
    )
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(sj.AdapterError, match="1 field.s. of unknown meaning: gain=2"):
        write(folder, config | names | {"gain": 2}, tensors)
        sj.load_peft(folder, CONFIGS["plain"])


def cell_with(words: str) -> str:
    """The one python cell of the README that holds these words."""
    cells = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    (cell,) = [cell for cell in cells if words in cell]
    return cell
