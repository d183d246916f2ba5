"""A new method in a few lines, and what the registry holds."""

from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import CONFIGS, lora_checkpoint, projections, write

from scute_jax import AdapterError, NormalForm, Term
from scute_jax.normal_form import Blocks, Kronecker, Sparse
from scute_jax.peft import load_peft, methods, register
from scute_jax.peft import registry as registry_module
from scute_jax.peft.orders import permuted


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry_module, "_METHODS", dict(registry_module._METHODS))


def define_mine():
    @register("MINE", live="s", inert=("mine_dropout",))
    def mine(site):
        """(x W) * s + a x A B, A of the bank that all sites share"""
        r = site.option("r", kind=int, required=True)
        bank = site.shared("mine_bank", (r, max(p.d_in for p in site.targets)))
        B = site.tensor("mine_B.weight", (site.d_out, r)).T
        order = site.tensor("mine_order", (r,), integer=True)
        s = site.tensor("mine_s", (site.d_out,), optional=True)
        A = site.once("doubled", lambda: 2 * bank)[order, : site.d_in].T
        c = site.matching("alpha_pattern", site.option("alpha", 1.0, kind=float), float)
        return NormalForm(s=s, terms=(Term(A, B, c=c),))

    return mine


def mine_checkpoint() -> tuple[dict, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    tensors = {"base_model.mine_bank": rng.normal(size=(3, 80)).astype(np.float32)}
    for p in projections("plain"):
        if p.module.endswith(("v_proj", "down_proj")):
            key = f"base_model.model.{p.module}"
            tensors[f"{key}.mine_B.weight"] = rng.normal(size=(p.d_out, 3)).astype(np.float32)
            tensors[f"{key}.mine_order"] = np.array([2, 0, 1])
    config = {"peft_type": "MINE", "r": 3, "alpha": 0.5, "target_modules": ["v_proj", "down_proj"]}
    return config | {"alpha_pattern": {r"layers\.1\..*": 4.0}, "mine_dropout": 0.1}, tensors


def test_a_method_of_ones_own(tmp_path: Path):
    define_mine()
    config, tensors = mine_checkpoint()
    adapter = load_peft(write(tmp_path, config, tensors), CONFIGS["plain"])
    assert adapter.method == "MINE" and len(adapter) == 4
    for site, c in (("layers.0.mlp.down_proj", 0.5), ("layers.1.self_attn.v_proj", 4.0)):
        term = adapter[site].terms[0]
        d_in = term.A.shape[0]
        assert np.allclose(term.A, c * 2 * tensors["base_model.mine_bank"][[2, 0, 1], :d_in].T)


def test_all_that_a_method_does_not_ask_for_is_refused(tmp_path: Path):
    define_mine()
    config, tensors = mine_checkpoint()
    extra = {"base_model.mine_extra": np.zeros(1, np.float32)}
    with pytest.raises(AdapterError, match="1 tensor.s. of no use: 'base_model.mine_extra'"):
        load_peft(write(tmp_path / "a", config, tensors | extra), CONFIGS["plain"])
    with pytest.raises(AdapterError, match="field.s. of unknown meaning: gain=2"):
        load_peft(write(tmp_path / "b", config | {"gain": 2}, tensors), CONFIGS["plain"])
    tensors["base_model.model.model.layers.0.mlp.down_proj.mine_order"] = np.zeros(3, np.float32)
    with pytest.raises(AdapterError, match="mine_order' has dtype float32, needed integers"):
        load_peft(write(tmp_path / "c", config, tensors), CONFIGS["plain"])


def test_a_cell_may_be_run_again_but_not_take_anothers_place():
    define_mine()
    define_mine()
    with pytest.raises(
        ValueError, match=r"LORA is already registered by scute_jax\.peft\.lora\.lora"
    ):

        @register("LORA")
        def mine(site):
            """x W"""


def test_a_variant_is_chosen_by_its_field(tmp_path: Path):
    @register("LORA", variant="use_twice", name="TWICE")
    def twice(site):
        """x W + 2 (x A) B"""
        form = next(m for m in methods() if m.name == "LORA").form(site)
        return form.replace(terms=form.terms * 2)

    config, tensors = lora_checkpoint(lora_dropout=0.0)
    config.pop("lora_dropout")
    plain = load_peft(write(tmp_path / "a", config, tensors), CONFIGS["plain"])
    doubled = load_peft(
        write(tmp_path / "b", config | {"use_twice": True}, tensors), CONFIGS["plain"]
    )
    assert (plain.method, doubled.method) == ("LORA", "TWICE")
    assert doubled["layers.0.mlp.down_proj"].rank == 2 * plain["layers.0.mlp.down_proj"].rank
    both = config | {"use_twice": True, "use_dora": True}
    with pytest.raises(AdapterError, match="use_dora.*'use_twice' is set as well"):
        load_peft(write(tmp_path / "c", both, tensors), CONFIGS["plain"])


EXTENSIONS = {"p": (24, 2, 2), "q": (12, 2, 2), "u": (48,), "s": (3,), "where": (3,)}  # v_proj
EXTENSIONS |= {"left": (6, 4), "right": (8, 6)}


@pytest.mark.parametrize("changed", EXTENSIONS)
def test_every_extension_is_loaded_and_part_of_the_version(changed: str, tmp_path: Path):
    @register("EXTENDED")
    def extended(site):
        """(base(x P)) Q + x S + x K + c ((x * u) A) B"""
        t = {name: site.tensor(name, shape) for name, shape in EXTENSIONS.items()}
        A, B = np.ones((site.d_in, 1), np.float32), np.ones((1, site.d_out), np.float32)
        order, where = np.arange(site.d_out)[::-1], t["where"].astype(np.int32)
        return NormalForm(
            P=(Blocks(t["p"]),),
            Q=(permuted(t["q"], order),),
            S=Sparse(where, where, t["s"]),
            K=(Kronecker(t["left"], t["right"]),),
            terms=(Term(A, B, u=t["u"], pair="ones"),),
        )

    def load(folder: Path, add: float):
        tensors = {
            f"base_model.model.model.layers.0.self_attn.v_proj.{name}": np.full(
                shape, 1 + (add if name == changed else 0), np.float32
            )
            for name, shape in EXTENSIONS.items()
        }
        config = {"peft_type": "EXTENDED", "target_modules": "model.layers.0.self_attn.v_proj"}
        return load_peft(write(folder, config, tensors), CONFIGS["plain"])

    one, same, other = (load(tmp_path / str(i), add) for i, add in enumerate([0, 0, 1]))
    assert one.version == same.version != other.version
    assert one.live == ("P", "Q", "u", "S", "K")
    form = one["layers.0.self_attn.v_proj"]
    assert form.Q[0].order.tolist() == list(range(24))[::-1] and form.Q[0].key
    assert form.terms[0].u.dtype == form.P[0].values.dtype == form.S.values.dtype == np.float32


def test_a_type_that_only_has_variants(tmp_path: Path):
    @register("ODD", variant="way")
    def odd(site):
        """x W"""
        return NormalForm()

    config = {"peft_type": "ODD", "target_modules": ["q_proj"]}
    with pytest.raises(AdapterError, match="of ODD only the variants with way"):
        load_peft(write(tmp_path, config, {}), CONFIGS["plain"])


def test_a_form_of_the_wrong_width_is_the_functions_mistake(tmp_path: Path):
    @register("WRONG")
    def wrong(site):
        """(x W) * s"""
        return NormalForm(s=np.ones(site.d_in + site.d_out, np.float32))

    config = {"peft_type": "WRONG", "target_modules": ["q_proj"]}
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.s has shape"):
        load_peft(write(tmp_path, config, {}), CONFIGS["plain"])


def test_unknown_types_name_those_that_are_served(tmp_path: Path):
    folder = write(tmp_path, {"peft_type": "NEW_TUNING"}, {})
    with pytest.raises(AdapterError, match="'NEW_TUNING'; served are LORA, IA3, OFT, SSF, VERA"):
        load_peft(folder, CONFIGS["plain"])


def test_the_built_in_methods_say_what_they_are():
    held = {m.name: m for m in methods()}
    assert set(held) >= {"LORA", "DORA", "IA3", "OFT", "SSF", "VERA", "BEFT", "BOFT", "RANDLORA"}
    assert held["DORA"].variant == "use_dora" and held["DORA"].peft_type == "LORA"
    assert all(m.equation for m in methods())
    live = {"LORA": "", "DORA": "sb", "IA3": "Rs", "OFT": "R", "SSF": "sb", "VERA": "de"}
    assert {name: held[name].live for name in live} == live
