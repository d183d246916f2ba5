"""A thousand damaged checkpoints: each is served exactly or refused by an error that names why.

Served exactly means that PEFT computes the same with the damaged file, or that the function is the
one of the sound file (PEFT does not read every spelling that is read here). Anything else fails.
"""

import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mutations import BASE, MUTATIONS, TENSORS, Case
from peft.tuners.lora import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from peft_oracle import compare, peft, quiet, save_adapter
from test_ssf import checkpoint as ssf_checkpoint
from tiny_checkpoints import CONFIGS, random_params, write

from scute_jax import Adapter, AdapterError
from scute_jax.peft import load_peft

SHARE = 126  # mutations of each of the first eight kinds of checkpoint
FEW = 42  # mutations of each of the others, which share the reading of files with the first
MODULES = ["q_proj", "v_proj", "down_proj"]
PATTERN = r"layers\.1\.mlp\.down_proj"

KINDS = {
    "lora": lambda: peft.LoraConfig(
        r=4, target_modules=MODULES, rank_pattern={PATTERN: 3}, use_rslora=True, lora_bias=True
    ),
    "lora with biases": lambda: peft.LoraConfig(
        r=3, target_modules=MODULES, bias="all", alpha_pattern={PATTERN: 5}, layers_to_transform=[1]
    ),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=MODULES, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=MODULES, feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=5, target_modules=MODULES),
    "vera drawn": lambda: quiet(
        peft.VeraConfig, r=5, target_modules=MODULES, save_projection=False, projection_prng_key=3
    ),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, target_modules=MODULES),
    "ssf": lambda: None,
}
LORA = {"r": 4, "target_modules": MODULES}
FOLDED = {
    "adalora": lambda: quiet(
        peft.AdaLoraConfig,
        init_r=4,
        total_step=9,
        target_modules=MODULES,
        rank_pattern={"model.layers.0.self_attn.q_proj.lora_E": [True, False, True, True]},
    ),
    "loha": lambda: peft.LoHaConfig(r=3, target_modules=MODULES, rank_pattern={PATTERN: 2}),
    "lokr": lambda: peft.LoKrConfig(r=3, target_modules=MODULES, decompose_both=True),
    "hra": lambda: quiet(peft.HRAConfig, **LORA, apply_GS=True, bias="all"),
    "delora": lambda: peft.DeloraConfig(**LORA, rank_pattern={PATTERN: 2}),
    "miss": lambda: peft.MissConfig(**LORA, init_weights="mini", mini_r=2),
    "vblora": lambda: peft.VBLoRAConfig(**LORA, num_vectors=5, vector_length=4, topk=3),
    "vblora of the largest": lambda: quiet(
        peft.VBLoRAConfig,
        **LORA,
        num_vectors=5,
        vector_length=4,
        topk=3,
        save_only_topk_weights=True,
    ),
    "gralora": lambda: peft.GraloraConfig(**LORA, gralora_k=2, hybrid_r=1),
    "velora": lambda: peft.LoraConfig(**LORA, velora_config=VeloraConfig(num_groups=4)),
    "monteclora": lambda: peft.LoraConfig(**LORA, monteclora_config=MontecloraConfig()),
    "psoft": lambda: quiet(peft.PsoftConfig, **LORA),
    "unilora": lambda: peft.UniLoraConfig(**LORA, theta_d_length=50, save_indices=True),
    "unilora drawn": lambda: peft.UniLoraConfig(**LORA, theta_d_length=50, proj_seed=3),
    "tinylora": lambda: peft.TinyLoraConfig(**LORA, u=3, weight_tying=0.5),
    "bdlora": lambda: peft.LoraConfig(
        **LORA,
        use_bdlora=BdLoraConfig(
            target_modules_bd_a=["q_proj", "v_proj"], target_modules_bd_b=["down_proj"], nblocks=2
        ),
    ),
    "kasa": lambda: peft.LoraConfig(**LORA, kasa_config=KasaConfig()),
    "deft": lambda: quiet(peft.DeftConfig, **LORA, decomposition_method="qr", alpha=8),
    "peanut": lambda: quiet(peft.PeanutConfig, **LORA, depth=1, act_fn="silu"),
    "glora": lambda: peft.GloraConfig(**LORA, config_A_B="vector", config_D_E="constant"),
}


@pytest.fixture(scope="module", params=[*KINDS, *FOLDED])
def sound(request, tmp_path_factory) -> tuple[str, Path, Adapter]:
    """The kind, the folder of a sound checkpoint, and the adapter in it."""
    folder, kind = tmp_path_factory.mktemp("sound"), request.param
    if kind == "ssf":
        write(folder, *ssf_checkpoint())
    else:
        save_adapter((KINDS | FOLDED)[kind](), BASE, folder, scale=0.15)
    return kind, folder, load_peft(folder, CONFIGS[BASE], random_params(BASE))


def test_served_exactly_or_refused_by_name(sound, tmp_path: Path):
    kind, folder, adapter = sound
    share, outcomes, wrong = SHARE if kind in KINDS else FEW, Counter(), []
    for seed in range(share):
        mutate = MUTATIONS[seed % len(MUTATIONS)]
        case = Case(tmp_path / str(seed), np.random.default_rng([seed, *kind.encode()]))
        shutil.copytree(folder, case.folder)
        mutate(case)
        outcome, problem = judge(case, adapter)
        outcomes[outcome] += 1
        if problem:
            wrong.append(f"{mutate.__name__}, seed {seed}, on {case.base}: {problem:.600}")
        shutil.rmtree(case.folder)
    assert not wrong, f"{kind}:\n" + "\n".join(wrong)
    assert outcomes["refused"] > share / 4 and outcomes["served"] > share / 10, outcomes


def judge(case: Case, sound: Adapter) -> tuple[str, str | None]:
    """What became of a mutated checkpoint, and what is wrong with that, if anything is."""
    try:
        adapter = load_peft(case.folder, CONFIGS[case.base], random_params(case.base))
    except AdapterError as error:
        text = str(error)
        if not re.search(case.names, text):
            return "refused", f"names not {case.names}: {text}"
        placed = str(case.folder) in text or "params" in text
        return "refused", None if placed else f"names no file: {text}"
    if sound.method == "SSF":
        return "served", None if _is_in_the_file(adapter, case) else "served, but not as written"
    unchanged = adapter.version == sound.version and case.base == BASE
    try:
        compare(adapter, case.folder, case.base, 1e-4, needs_effect=False)
    except AssertionError as error:
        overflows = re.search("effect of (nan|inf)", str(error))  # in the float32 of PEFT
        harmless = overflows or (unchanged and _is_spelling(case))
        return "served", None if harmless else f"served, but PEFT computes something else: {error}"
    except Exception as error:  # PEFT fails with whatever it fails with
        reason = f"served, but PEFT fails: {type(error).__name__}: {error}"
        is_half = "scatter(): Expected self.dtype" in reason  # VB-LoRA of PEFT takes float32 alone
        return "served", None if unchanged or is_half else reason
    return "served", None


def _is_spelling(case: Case) -> bool:
    """Whether the keys are written in a way that PEFT passes over: it draws those tensors anew."""
    keys = case.tensors()
    return any(not key.startswith("base_model.") or ".default" in key for key in keys)


def _is_in_the_file(adapter: Adapter, case: Case) -> bool:
    """SSF has no PEFT to compare with: every vector that is served has to be in the file."""
    if not (case.folder / TENSORS).exists():
        return True  # the same tensors as .bin; what is damaged in them, a checksum of zip finds
    tensors, used = case.tensors(), 0
    for site, form in adapter.sites.items():
        for name, vector, none in (("ssf_scale", form.s, 1.0), ("ssf_shift", form.b, 0.0)):
            held = [v for k, v in tensors.items() if f".{site}.{name}" in f".{k}"]
            served = np.full_like(held[0], none) if vector is None else vector
            used += len(held) == 1 and np.array_equal(np.float32(held[0]), served)
    return used == len(tensors) == 2 * len(adapter.sites)
