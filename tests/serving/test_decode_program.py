"""How XLA compiles a decode step: by its rows, and only where there is a GPU."""

import jax
import jax.numpy as jnp
import pytest

from scute_jax.serving import EngineOptions
from scute_jax.serving.runner import decode_program

FEW, MANY = 32, 33


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize("wanted, without", [(None, {MANY}), (True, set()), (False, {FEW, MANY})])
def test_triton_products_are_for_few_rows_unless_told_otherwise(on_a_gpu, wanted, without):
    options = EngineOptions(triton_gemm=wanted)
    for rows in (FEW, MANY):
        given = options.decode_compiler_options(rows)
        assert ("xla_gpu_enable_triton_gemm" in given) == (rows in without)
    programs = {decode_program(options, rows) for rows in (1, FEW, MANY, 200)}
    assert len(programs) == (2 if wanted is None else 1)


def test_other_machines_compile_as_ever():
    assert EngineOptions(triton_gemm=False).decode_compiler_options(MANY) == {}


def test_the_flags_are_known_to_xla(on_a_gpu):
    given = EngineOptions(triton_gemm=False).decode_compiler_options(MANY)
    program = jax.jit(lambda x: x @ x, compiler_options=given)
    assert float(program(jnp.ones((2, 2)))[0, 0]) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such": 0})(jnp.ones(2))
