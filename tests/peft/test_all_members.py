"""Every method that is served, and the base, in one batch at one site, each held to PEFT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boft_extension import with_extension  # noqa: F401
from members import (
    CONFIGS_OF,
    ELSEWHERE,
    NOT_OF_PEFT,
    load_member,
    prepare_member,
    save_member,
)
from peft_oracle import layer_output, load_with_peft
from test_miss import as_bone
from tiny_checkpoints import CONFIGS, base_output, random_params, write

import scute_jax as sj
from scute_jax.peft import load_peft, methods

BASE, MODULE = "biased", "model.layers.0.self_attn.q_proj"
SITE, ROWS, TOLERANCE = MODULE.removeprefix("model."), 4, 1e-4
# Of torch, wherever a sparse tensor is made, which is what PEFT does.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """Name -> (normal form, rows of x, what PEFT makes of them), the base among them."""
    rng, root, params = np.random.default_rng(5), tmp_path_factory.mktemp("members"), {}
    params = random_params(BASE)
    members, plain = {}, base_output(params, MODULE)
    for name in CONFIGS_OF:
        folder = save_member(name, BASE, root / name, ["q_proj"])
        x = rng.normal(size=(ROWS, 48)).astype(np.float32)
        model = load_with_peft(folder, BASE)
        prepare_member(name, model)
        form = load_member(name, folder, CONFIGS[BASE], params)[SITE]
        members[name] = form, x, layer_output(model, MODULE, x)
    bone = load_peft(as_bone(root / "MISS"), CONFIGS[BASE])
    members["BONE"] = bone[SITE], *members["MISS"][1:]
    members["SSF"] = _ssf(rng, root / "SSF", plain)
    x = rng.normal(size=(ROWS, 48)).astype(np.float32)
    return members | {"base": (sj.NormalForm(), x, plain(np.float64(x)))}


def _ssf(rng, folder, plain):
    scale, shift = 1 + 0.3 * rng.normal(size=72), 0.3 * rng.normal(size=72)
    vectors = {"ssf_scale": scale.astype(np.float32), "ssf_shift": shift.astype(np.float32)}
    tensors = {f"base_model.model.{MODULE}.{name}": v for name, v in vectors.items()}
    config = {"peft_type": "SSF", "target_modules": ["layers.0.self_attn.q_proj"]}
    form = load_peft(write(folder, config, tensors), CONFIGS[BASE])[SITE]
    x = rng.normal(size=(ROWS, 48)).astype(np.float32)
    return form, x, plain(np.float64(x)) * vectors["ssf_scale"] + vectors["ssf_shift"]


def test_every_method_that_is_served_is_a_member(batch):
    assert {m.name for m in methods()} == {*CONFIGS_OF, *ELSEWHERE, *NOT_OF_PEFT}
    assert {name for form, _, _ in batch.values() for name in form.live} >= set("PRQsbudeS")


def test_all_methods_in_one_batch(batch):
    params, names = random_params(BASE), [name for name in batch if name != "base"]
    ids = np.repeat([-1, *range(len(names))], ROWS)
    x = np.concatenate([batch["base"][1], *(batch[name][1] for name in names)])
    order = np.random.default_rng(0).permutation(len(ids))

    @jax.jit
    def step(site, x, ids):
        return sj.apply_normal_form(site, x, sj.segments(ids, len(names)))

    site = sj.site_params(
        jnp.asarray(params[f"{MODULE}.weight"].T),
        [batch[name][0] for name in names],
        jnp.asarray(params[f"{MODULE}.bias"]),
    )
    y = np.empty((len(ids), 72))
    y[order] = step(site, jnp.asarray(x[order]), jnp.asarray(ids[order]))

    plain, errors = base_output(params, MODULE), {}
    for k, name in enumerate(["base", *names]):
        _, own_x, theirs = batch[name]
        ours, base_y = y[k * ROWS : (k + 1) * ROWS], plain(np.float64(own_x))
        effect = np.linalg.norm(base_y if name == "base" else theirs - base_y)
        assert effect > 1e-2 * np.linalg.norm(base_y), f"{name} has no effect to compare"
        errors[name] = np.linalg.norm(ours - theirs) / effect
    assert max(errors.values()) <= TOLERANCE, sorted(errors.items(), key=lambda e: -e[1])[:5]
