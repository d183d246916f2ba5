"""What the README says is so: its table is that of the registry, and its code runs."""

import re
from pathlib import Path

import numpy as np
import pytest
from forms import evaluate
from tiny_checkpoints import CONFIGS, write

import scute_jax as sj
from scute_jax.peft import registry
from scute_jax.peft.table import with_table

README = Path(__file__).parents[1] / "README.md"


def test_the_table_of_methods_is_that_of_the_registry():
    text = README.read_text()
    assert text == with_table(text), "run: python -m scute_jax.peft.table, and put it in"


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
