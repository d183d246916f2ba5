"""OFT against the PEFT library, and the older formulas against PEFT's sources of their time."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_peft_names import MODULES
from tiny_checkpoints import CONFIGS, projections, random_params, write

from scute_jax import AdapterError
from scute_jax.peft import load_peft
from scute_jax.peft.oft import nearest_divisor, neumann, neumann_coefficients, skew
from scute_jax.peft.oft_blocks import cayley

widths = st.integers(1, 120)


@settings(max_examples=40, deadline=None)
@given(
    size=st.one_of(
        st.tuples(st.just(0), st.integers(1, 90)), st.tuples(st.integers(1, 90), st.just(0))
    ),
    neumann=st.booleans(),
    terms=st.integers(0, 8),
    coft=st.booleans(),
    eps=st.sampled_from([1e-4, 0.05, 0.4, 30.0]),
    shared=st.booleans(),
    bias=st.sampled_from(["none", "all", "oft_only"]),
    modules=st.sets(st.sampled_from((*MODULES, "lm_head")), min_size=1),
    base=st.sampled_from(["plain", "biased", "qwen2"]),
)
def test_every_option(size, neumann, terms, coft, eps, shared, bias, modules, base):
    from peft_oracle import peft, quiet, serve

    r, k = size
    config = quiet(
        peft.OFTConfig,
        r=r,
        oft_block_size=k,
        use_cayley_neumann=neumann,
        num_cayley_neumann_terms=terms,
        coft=coft,
        eps=eps,
        block_share=shared,
        bias=bias,
        target_modules=list(modules),
    )
    spread = 0.5 / math.sqrt(max(k, 80 // max(r, 1), 1))  # the norm of Q stays below one
    adapter = serve(config, base, scale=spread, needs_effect=False, save_embedding_layers=False)
    assert set(adapter.live) - {"b"} == {"R"}


def test_a_shared_block_is_held_once(tmp_path: Path):
    config, tensors = checkpoint(
        "oft_R.weight", lambda d_in: (1, 28), block_share=True, peft_version="0.20.0"
    )
    R = load_peft(write(tmp_path, config, tensors), CONFIGS["plain"])["layers.0.mlp.down_proj"].R
    assert R.shape == (10, 8, 8)
    assert R.strides[0] == 0


@pytest.mark.parametrize("terms", [2, 3, 4, 5, 7])
def test_the_series_of_peft_0_17_weighs_the_last_power_twice(terms: int, tmp_path: Path):
    """R = I + 2 (Q + Q^2 + ... + Q^(terms - 1)): _cayley_batch of PEFT 0.16 and 0.17."""
    config, tensors = checkpoint(
        "oft_R.weight", lambda d_in: (d_in // 8, 28), peft_version="0.17.1"
    )
    config |= {"use_cayley_neumann": True, "num_cayley_neumann_terms": terms}
    adapter = load_peft(write(tmp_path, config, tensors), CONFIGS["plain"])
    assert adapter.info["notes"] == (
        "Neumann series of PEFT 0.16 and 0.17: the last power counts twice",
    )
    for p in adapted():
        U = np.zeros((p.d_in // 8, 8, 8))
        rows, columns = np.triu_indices(8, 1)
        U[:, rows, columns] = tensors[f"base_model.model.{p.module}.oft_R.weight"]
        Q = U - U.transpose(0, 2, 1)
        powers = [np.linalg.matrix_power(Q, n) for n in range(1, terms)]
        assert np.allclose(adapter[p.site].R, np.eye(8) + 2 * sum(powers), atol=1e-6)


def test_a_version_that_is_not_stated_is_refused_where_it_matters(tmp_path: Path):
    config, tensors = checkpoint("oft_R.weight", lambda d_in: (d_in // 8, 28))
    for version in ({}, {"peft_version": "unknown"}, {"peft_version": "0.18.0.dev0@abc"}):
        folder = write(tmp_path, config | version, tensors)
        with pytest.raises(AdapterError, match=r"peft_version.*0\.17\.0.*0\.18\.0"):
            load_peft(folder, CONFIGS["plain"])
    exact = load_peft(
        write(tmp_path, config | {"use_cayley_neumann": False}, tensors), CONFIGS["plain"]
    )
    small = {key: 1e-3 * array for key, array in tensors.items()}  # the last power is rounding
    assert (
        load_peft(write(tmp_path, config, small), CONFIGS["plain"]).sites.keys()
        == exact.sites.keys()
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 8, "oft_block_size": 0},
        {"r": 0, "oft_block_size": 7},
        {"r": 8, "oft_block_size": 0, "block_share": True},
        {"r": 8, "oft_block_size": 0, "coft": True, "eps": 2e-3},
        {"r": 8, "oft_block_size": 0, "coft": True, "eps": 1e-2, "block_share": True},
    ],
)
def test_the_format_of_peft_0_14(fields: dict, tmp_path: Path):
    """y = F.linear(x, (rotation @ W.T).T * s, bias): Linear.forward of PEFT 0.15.2."""

    def blocks(d_in: int) -> int:
        n = fields["r"] or d_in // nearest_divisor(d_in, fields["oft_block_size"])
        return nearest_divisor(d_in, n)

    def shape(d_in: int) -> tuple[int, int, int]:
        k = d_in // blocks(d_in)
        return (1 if fields.get("block_share") else blocks(d_in), k, k)

    config, tensors = checkpoint("oft_r", shape, base="biased", **fields)
    config.pop("oft_block_size" if "oft_block_size" not in fields else "x", None)
    rng = np.random.default_rng(1)
    for p in adapted("biased"):
        s = 1 + 0.3 * rng.normal(size=(p.d_out, 1))
        tensors[f"base_model.model.{p.module}.oft_s"] = s.astype(np.float32)
    params = random_params("biased")
    adapter = load_peft(write(tmp_path, config, tensors), CONFIGS["biased"], params)
    for p in adapted("biased"):
        M = np.float64(tensors[f"base_model.model.{p.module}.oft_r"])
        n, k = blocks(p.d_in), M.shape[-1]
        if fields.get("coft"):
            eps = fields["eps"] * math.ceil(p.d_out / n) ** 2 / math.sqrt(len(M))
            M = np.stack(
                [m if np.linalg.norm(m) <= eps else eps * m / np.linalg.norm(m) for m in M]
            )
        rotation = np.zeros((p.d_in, p.d_in))
        for j in range(n):
            S = (M[j % len(M)] - M[j % len(M)].T) / 2
            at = slice(j * k, (j + 1) * k)
            rotation[at, at] = (np.eye(k) - S) @ np.linalg.inv(np.eye(k) + S)
        form, s = adapter[p.site], tensors[f"base_model.model.{p.module}.oft_s"][:, 0]
        blocks_of_ours = np.zeros((p.d_in, p.d_in))
        for j in range(n):
            blocks_of_ours[j * k : (j + 1) * k, j * k : (j + 1) * k] = form.R[j]
        assert np.allclose(blocks_of_ours, rotation, atol=1e-6)
        assert np.array_equal(form.s, s)
        assert np.allclose(form.b, params[f"{p.module}.bias"] * (1 - s), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 4}, "field 'r' is 4; exactly one of r and oft_block_size"),
        ({"oft_block_size": 0}, "exactly one"),
        ({"oft_block_size": 16}, r"oft_R\.weight.*\[6, 28\].*\[3, 120\]"),
        ({"block_share": True}, r"oft_R\.weight.*\[6, 28\].*\[1, 28\]"),
        ({"coft": True, "eps": -1.0}, "eps.*at least 0"),
        ({"num_cayley_neumann_terms": 10**9}, "num_cayley_neumann_terms"),
        ({"use_cayley_neumann": "yes"}, "use_cayley_neumann.*true or false"),
    ],
)
def test_what_contradicts_itself_is_refused(fields: dict, message: str, tmp_path: Path):
    config, tensors = checkpoint(
        "oft_R.weight", lambda d_in: (d_in // 8, 28), peft_version="0.21.0"
    )
    with pytest.raises(AdapterError, match=message):
        load_peft(write(tmp_path, config | fields, tensors), CONFIGS["plain"])


@given(widths, widths)
def test_the_nearest_divisor_is_peft_s(width: int, wanted: int):
    layer = pytest.importorskip("peft.tuners.oft.layer", reason="the oracle is PEFT")
    assert nearest_divisor(width, wanted) == layer.OFTLayer.adjust_oft_parameters(
        None, width, wanted
    )


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_the_exact_transform_is_orthogonal(k: int, seed: int):
    Q = skew(np.random.default_rng(seed).normal(size=(3, k * (k - 1) // 2)), k)
    R = cayley(Q)
    assert np.allclose(R @ R.transpose(0, 2, 1), np.eye(k), atol=1e-9)
    assert np.allclose(R @ (np.eye(k) + Q), np.eye(k) - Q, atol=1e-9)


def test_three_and_four_terms_are_one_series():
    assert neumann_coefficients(1) == neumann_coefficients(0) == (1.0,)
    assert neumann_coefficients(2) == (1.0, 2.0)
    assert neumann_coefficients(3) == neumann_coefficients(4) == (1.0, 2.0, 2.0, 1.0)
    assert neumann_coefficients(3, before_0_18=True) == (1.0, 2.0, 2.0)
    assert np.allclose(neumann(np.zeros((1, 2, 2)), neumann_coefficients(5)), np.eye(2))


def adapted(base: str = "plain"):
    return [p for p in projections(base) if p.module.endswith(("v_proj", "down_proj"))]


def checkpoint(name: str, shape, base: str = "plain", **fields) -> tuple[dict, dict]:
    """A random OFT on v_proj and down_proj; `shape` gives the tensor's shape from d_in."""
    rng = np.random.default_rng(0)
    config = {"peft_type": "OFT", "r": 0, "oft_block_size": 8} | fields
    config["target_modules"] = ["v_proj", "down_proj"]
    tensors = {
        f"base_model.model.{p.module}.{name}": 0.2 * rng.normal(size=shape(p.d_in))
        for p in adapted(base)
    }
    return json.loads(json.dumps(config)), {k: v.astype(np.float32) for k, v in tensors.items()}
