"""What the README says is so: its table is that of the registry, and its code runs."""

import re
from pathlib import Path

import numpy as np

from scute_jax.peft.table import with_table

README = Path(__file__).parents[1] / "README.md"


def test_the_table_of_methods_is_that_of_the_registry():
    text = README.read_text()
    assert text == with_table(text), "run: python -m scute_jax.peft.table, and put it in"


def test_the_first_notebook_cell_runs():
    (cell,) = [
        c for c in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "W =" in c
    ]
    scope: dict = {}
    exec(cell, scope)
    lora, x = scope["lora"].terms[0], np.ones((1, 64))
    expected = x @ np.asarray(scope["W"]) + 0.5 * x @ lora.A @ lora.B
    np.testing.assert_allclose(scope["y"][0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(scope["y"][2], scope["both"].s * expected[0], rtol=1e-4)
