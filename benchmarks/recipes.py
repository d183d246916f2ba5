"""Adapters for measurements: configs of the PEFT library, and how far their numbers are moved.

`make` writes a folder as PEFT does: trainable numbers moved by a scale times normal ones, so that
an adapter changes the log-probabilities by a nat and more; near the identity a dropped slot shows
in nothing.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
FF = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
LORA = {"target_modules": EVERY, "init_lora_weights": False}
ALL = {"target_modules": EVERY}

Recipes = dict[str, tuple[peft.PeftConfig, float]]


def five_methods() -> Recipes:
    """LoRA, DoRA, (IA)3, VeRA and OFT, some in two sizes."""
    return {
        "LoRA r16": (peft.LoraConfig(r=16, lora_alpha=16, **LORA), 0.06),
        "LoRA r64": (peft.LoraConfig(r=64, lora_alpha=32, **LORA), 0.1),
        "DoRA r8": (peft.LoraConfig(r=8, use_dora=True, **ALL), 0.12),
        "(IA)3": (peft.IA3Config(**FF), 0.3),
        "VeRA r256": (peft.VeraConfig(r=256, target_modules=EVERY[:-1]), 0.7),
        "VeRA r128": (
            peft.VeraConfig(r=128, target_modules=EVERY[:-1], projection_prng_key=7),
            0.75,
        ),
        "OFT 32": (peft.OFTConfig(oft_block_size=32, **ALL), 0.02),
        "OFT 16 exact": (
            peft.OFTConfig(oft_block_size=16, use_cayley_neumann=False, **ALL),
            0.04,
        ),
    }


def all_methods() -> Recipes:
    """One adapter of every method, as far as PEFT makes it from a config alone."""
    return {
        "LoRA": (peft.LoraConfig(r=16, lora_alpha=16, **LORA), 0.06),
        "rsLoRA": (peft.LoraConfig(r=8, lora_alpha=8, use_rslora=True, **LORA), 0.013),
        "DoRA": (peft.LoraConfig(r=8, use_dora=True, **ALL), 0.1),
        "BD-LoRA": (
            peft.LoraConfig(
                r=16,
                use_bdlora=BdLoraConfig(
                    target_modules_bd_a=["o_proj", "down_proj"],
                    target_modules_bd_b=["q_proj", "k_proj", "v_proj", "up_proj", "gate_proj"],
                    nblocks=4,
                ),
                **LORA,
            ),
            0.14,
        ),
        "KaSA": (  # without v_proj, where its start alone moves the text by four nats
            peft.LoraConfig(r=8, kasa_config=KasaConfig(), target_modules=["q_proj", *EVERY[3:]]),
            0.1,
        ),
        "VeLoRA": (peft.LoraConfig(r=8, lora_alpha=3, velora_config=VeloraConfig(), **LORA), 0.06),
        "MonteCLoRA": (
            peft.LoraConfig(r=8, lora_alpha=3, monteclora_config=MontecloraConfig(), **LORA),
            0.06,
        ),
        "AdaLoRA": (peft.AdaLoraConfig(init_r=12, target_r=8, total_step=10, **ALL), 0.3),
        "(IA)3": (peft.IA3Config(**FF), 0.3),
        "VeRA": (peft.VeraConfig(r=256, target_modules=EVERY[:-1]), 0.5),
        "PVeRA": (peft.PveraConfig(r=64, target_modules=EVERY[:-1]), 0.5),
        "OFT": (peft.OFTConfig(oft_block_size=32, **ALL), 0.02),
        "BOFT": (peft.BOFTConfig(boft_block_size=4, **ALL), 0.1),
        "BOFT m=2": (
            peft.BOFTConfig(boft_block_size=8, boft_n_butterfly_factor=2, target_modules=ATTENTION),
            0.1,
        ),
        "RoAD": (peft.RoadConfig(variant="road_4", group_size=64, **ALL), 0.2),
        "BEFT": (peft.BeftConfig(target_modules=["v_proj"]), 0.3),
        "RandLoRA": (peft.RandLoraConfig(r=32, target_modules=ATTENTION), 0.005),
        "FourierFT": (peft.FourierFTConfig(n_frequency=300, scaling=100.0, **ALL), 1.0),
        "LoHa": (peft.LoHaConfig(r=4, alpha=4, init_weights=False, **ALL), 0.1),
        "LoKr": (peft.LoKrConfig(r=8, alpha=8, init_weights=False, **ALL), 0.1),
        "GraLoRA": (peft.GraloraConfig(r=8, gralora_k=2, **ALL), 0.1),
        "DeLoRA": (peft.DeloraConfig(r=8, **ALL), 0.3),
        "HRA": (peft.HRAConfig(r=4, **ALL), 0.3),
        "MiSS": (peft.MissConfig(r=16, **ALL), 0.05),
        "VB-LoRA": (peft.VBLoRAConfig(r=4, num_vectors=64, vector_length=64, **ALL), 0.3),
        "Uni-LoRA": (peft.UniLoraConfig(r=4, theta_d_length=512, **ALL), 1.0),
        "TinyLoRA": (peft.TinyLoraConfig(r=2, u=13, **ALL), 0.5),
        "DEFT": (peft.DeftConfig(r=8, **ALL), 0.1),
        "PEANUT": (peft.PeanutConfig(r=16, depth=0, **ALL), 0.1),
        "PSOFT": (peft.PsoftConfig(r=32, target_modules=ATTENTION), 0.1),
        "GLoRA": (peft.GloraConfig(r=4, config_A_B="vector", **ALL), 0.1),
        "SHiRA": (peft.ShiraConfig(r=8, **ALL), 0.3),
        "SuperTuning": (peft.SupertuningConfig(sparsity=0.99, **ALL), 0.3),
        "WaveFT": (peft.WaveFTConfig(n_frequency=512, **ALL), 0.3),
        "LN tuning": (peft.LNTuningConfig(), 0.3),
    }


def make(twin, name: str, seed: int, config: peft.PeftConfig, scale: float, scratch: Path) -> Path:
    """A folder as PEFT writes it, numbers moved by `scale` times normal ones, in bfloat16."""
    model = peft.get_peft_model(twin, config)
    move(model, seed, scale)
    return write(model, name, seed, scratch)


def make_with_effect(
    twin, name: str, config: peft.PeftConfig, scale: float, scratch: Path, run: Callable
) -> tuple[Path, Any]:
    """As `make`, but with the scale changed until the effect lies between 1.5 and 4 nats.

    `run(model)` returns (mean effect in nats, anything else); returns the folder and the last of
    the latter.
    """
    torch.manual_seed(0)
    own_base = copy.deepcopy(twin)  # KaSA changes it for good
    model = peft.get_peft_model(own_base, config).eval()
    start = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    for _ in range(8):
        move(model, 0, scale, start)
        effect, result = run(model)
        if 1.5 < effect < 4:
            break
        scale *= 0.6 if not effect < 4 else 1.4
    return write(model, name, 0, scratch), result


def move(model, seed: int, scale: float, start: list[torch.Tensor] | None = None) -> None:
    """Sets the trainable numbers to their start plus normal ones times `scale`, in bfloat16.

    Logits, of which a method takes the largest, are not rounded: some would become equal.
    """
    generator = torch.Generator().manual_seed(seed)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for (name, parameter), origin in zip(
            trainable.items(), start or trainable.values(), strict=True
        ):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            moved = origin.to(parameter.device) + scale * noise
            parameter.copy_(moved if "logits" in name else moved.bfloat16().float())


def slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def write(model, name: str, seed: int, scratch: Path) -> Path:
    """Saves the adapter of a model and takes it off."""
    folder = scratch / f"{slug(name)}-{seed}"
    model.save_pretrained(folder)
    model.unload()
    return folder
