"""Damaged checkpoints of embeddings, heads, tokens and norms: served exactly or refused by name."""

import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from forms import apply_over
from mutations import BASE, MUTATIONS, Case
from peft_oracle import layer_output, load_with_peft, peft, quiet
from tiny_checkpoints import base_output, projections, random_params
from vocabulary_oracle import checkpoint, compare_vocabulary, loaded

from scute_jax import Adapter, AdapterError, NormalForm

SHARE = 84  # mutations of each kind
LORA = {"r": 3, "target_modules": ["q_proj", "v_proj"]}
BOTH = {"r": 3, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}
KINDS = {
    "lora of both": lambda: quiet(peft.LoraConfig, **BOTH),
    "dora of both": lambda: quiet(peft.LoraConfig, **BOTH, use_dora=True),
    "listed tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[3, 9]),
    "listed of both": lambda: peft.LoraConfig(
        **LORA, trainable_token_indices={"embed_tokens": [3, 9], "lm_head": [5]}
    ),
    "saved": lambda: quiet(peft.LoraConfig, **LORA, modules_to_save=["embed_tokens", "model.norm"]),
    "trained tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 9, 1]),
    "ln tuning": lambda: quiet(peft.LNTuningConfig),
}


@pytest.mark.parametrize("kind", KINDS)
def test_served_exactly_or_refused_by_name(kind: str, tmp_path: Path):
    folder = checkpoint(KINDS[kind](), BASE, tmp_path / "sound", tokens=[3, 9])
    sound, outcomes, wrong = loaded(folder, BASE), Counter(), []
    for seed in range(SHARE):
        mutate = MUTATIONS[seed % len(MUTATIONS)]
        case = Case(tmp_path / str(seed), np.random.default_rng([seed, *kind.encode()]))
        shutil.copytree(folder, case.folder)
        mutate(case)
        outcome, problem = judge(case, sound)
        outcomes[outcome] += 1
        if problem:
            wrong.append(f"{mutate.__name__}, seed {seed}, on {case.base}: {problem:.600}")
        shutil.rmtree(case.folder)
    assert not wrong, f"{kind}:\n" + "\n".join(wrong)
    assert outcomes["refused"] > SHARE / 4 and outcomes["served"] > SHARE / 12, outcomes


def judge(case: Case, sound: Adapter) -> tuple[str, str | None]:
    """What became of a mutated checkpoint, and what is wrong with that, if anything is."""
    try:
        adapter = loaded(case.folder, case.base)
    except AdapterError as error:
        text = str(error)
        if not re.search(f"{case.names}|adapter_model|adapter_config", text):
            return "refused", f"names not {case.names}: {text}"
        return "refused", None if str(case.folder) in text else f"names no file: {text}"
    if adapter.version == sound.version and case.base == BASE:
        return "served", None
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            compare_vocabulary(adapter, case.folder, case.base, needs_effect=False, share=1e-4)
            _compare_projections(adapter, case)
    except AssertionError as error:
        overflows = re.search("effect of (nan|inf)", str(error))  # in the float32 of PEFT
        return "served", None if overflows else f"served, but PEFT computes something else: {error}"
    except Exception as error:  # PEFT fails with whatever it fails with
        return "served", f"served, but PEFT fails: {type(error).__name__}: {error}"
    return "served", None


def _compare_projections(adapter: Adapter, case: Case) -> None:
    model, rng = load_with_peft(case.folder, case.base), np.random.default_rng(3)
    for p in projections(case.base)[:-1]:
        x = rng.normal(size=(3, p.d_in)).astype(np.float32)
        base = base_output(random_params(case.base), p.module)
        ours = apply_over(adapter.sites.get(p.site, NormalForm()), base, np.float64(x))
        theirs, plain = layer_output(model, p.module, x), base(np.float64(x))
        bound = 1e-4 * np.linalg.norm(theirs - plain) + 1e-6 * np.linalg.norm(plain)
        assert np.linalg.norm(ours - theirs) <= bound, p.site
