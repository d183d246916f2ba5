"""How XLA compiles the steps, where there is a GPU."""

import jax
import jax.numpy as jnp
import pytest

from scute_jax.serving.runner import compiler_options


def test_the_options_are_known_to_xla(monkeypatch: pytest.MonkeyPatch):
    assert compiler_options() == {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    program = jax.jit(lambda x: x @ x, compiler_options=compiler_options())
    assert float(program(jnp.ones((2, 2)))[0, 0]) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such": 0})(jnp.ones(2))
