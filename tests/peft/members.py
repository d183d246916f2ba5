"""One amplified adapter of every method that the PEFT library has, for tests that mix them.

Name of the method -> its configuration in PEFT, made for some projections; ELSEWHERE are those that
change none. NOT_OF_PEFT are served, too, but are no methods of the installed PEFT.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft.tuners.lora import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from peft.tuners.lora.layer import LoraLayer
from peft_oracle import peft, quiet, save_adapter, torch

from scute_jax import Adapter
from scute_jax.peft import load_peft

TASK = 1  # of the adapter that mixes its parts per task
INVOCATION = [1, 2]  # the tokens from which on the activated LoRA acts
TOKENS = [5, 11, 60]  # that the adapter with rows of its own replaces
NOT_OF_PEFT = {"SSF", "BONE"}


def _lora(**fields) -> Callable[[list[str]], peft.LoraConfig]:
    return lambda modules: peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules, **fields)


def _of(kind: Callable[..., peft.PeftConfig], **fields) -> Callable[[list[str]], peft.PeftConfig]:
    return lambda modules: kind(target_modules=modules, **fields)


CONFIGS_OF: dict[str, Callable[[list[str]], Any]] = {
    "LORA": _lora(lora_bias=True),
    "DORA": _lora(use_dora=True),
    "IA3": _of(peft.IA3Config, feedforward_modules=r".*down_proj"),
    "OFT": _of(peft.OFTConfig, oft_block_size=8),
    "VERA": _of(peft.VeraConfig, r=7),
    "BEFT": _of(peft.BeftConfig),
    "BOFT": _of(peft.BOFTConfig, boft_block_size=4, boft_n_butterfly_factor=2),
    "FOURIERFT": _of(peft.FourierFTConfig, n_frequency=9, scaling=20.0),
    "PVERA": _of(peft.PveraConfig, r=6),
    "RANDLORA": _of(peft.RandLoraConfig, r=9, randlora_alpha=9),
    "VELORA": _lora(velora_config=VeloraConfig(num_groups=4)),
    "MONTECLORA": _lora(monteclora_config=MontecloraConfig()),
    "ALORA": _lora(alora_invocation_tokens=INVOCATION),
    "ADALORA": _of(peft.AdaLoraConfig, init_r=5, total_step=9),
    "BDLORA": lambda modules: _lora(
        use_bdlora=BdLoraConfig(target_modules_bd_a=modules, nblocks=2),
    )(modules),
    "DEFT": _of(peft.DeftConfig, r=3),
    "DELORA": _of(peft.DeloraConfig, r=4),
    "GLORA": _of(peft.GloraConfig, r=2, config_A_B="vector"),
    "GRALORA": _of(peft.GraloraConfig, r=4, gralora_k=2, hybrid_r=2),
    "HRA": _of(peft.HRAConfig, r=3),
    "KASA": _lora(kasa_config=KasaConfig()),
    "LOHA": _of(peft.LoHaConfig, r=4),
    "LOKR": _of(peft.LoKrConfig, r=2),
    "MISS": _of(peft.MissConfig, r=6),
    "PEANUT": _of(peft.PeanutConfig, r=4, depth=1),
    "POLY": _of(peft.PolyConfig, r=3, n_tasks=2, n_skills=3, n_splits=2),
    "PSOFT": _of(peft.PsoftConfig, r=5),
    "ROAD": _of(peft.RoadConfig, group_size=8),
    "SHIRA": _of(peft.ShiraConfig, r=2, random_seed=1),
    "SUPERTUNING": _of(peft.SupertuningConfig, sparsity=0.9),
    "WAVEFT": _of(peft.WaveFTConfig, n_frequency=60, scaling=20.0),
    "TINYLORA": _of(peft.TinyLoraConfig, r=3, u=5),
    "UNILORA": _of(peft.UniLoraConfig, r=3, theta_d_length=64),
    "VBLORA": _of(peft.VBLoRAConfig, r=3, num_vectors=9, vector_length=8),
}


ELSEWHERE: dict[str, Callable[[list[str]], Any]] = {
    "LN_TUNING": lambda modules: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "TRAINABLE_TOKENS": lambda modules: peft.TrainableTokensConfig(token_indices=TOKENS),
}


def save_member(name: str, base: str, folder: Path, modules: list[str], scale: float = 0.3) -> Path:
    """The files of the adapter of a method, on these modules of a tiny base."""
    config = quiet((CONFIGS_OF | ELSEWHERE)[name], modules=modules)
    return save_adapter(config, base, folder, scale=scale)


def load_member(name: str, folder: Path, config: Any, params: Any) -> Adapter:
    return load_peft(folder, config, params, options={"task_id": TASK} if name == "POLY" else None)


def prepare_member(name: str | None, model: peft.PeftModel) -> None:
    """Tells the layers of a PEFT model which task they do, or that every token is invoked."""
    if name == "POLY":
        model.base_model._register_pre_hooks(torch.tensor([TASK]))
    if name == "ALORA":
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.register_forward_pre_hook(_invoked, with_kwargs=True)


def _invoked(module, args, kwargs):
    return args, kwargs | {"alora_offsets": [args[0].shape[1]]}
