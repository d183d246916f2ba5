"""Tenants that adapt norms, the embedding, the head and the tokens, over a tiny base.

Some numbers of the base's norms are zero, where no scale makes another number of them. The tenant
"added" was trained on ADDED more tokens than the base has.
"""

import warnings
from pathlib import Path

import torch
from peft import LNTuningConfig, LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from peft_oracle import base_model

VOCAB, ADDED = 97, 4
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
TOKENS = [3, 7, 8, 20, 50, 96]  # replaced
LORA = {"r": 5, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
ADAPTED = LORA | {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}


def recipes(tied: bool) -> dict:
    """Name -> (PEFT config, how much its numbers are moved)."""
    made = {
        "lora": (LoraConfig(**LORA), 0.1),
        "norms": (LNTuningConfig(target_modules=NORMS), 0.3),
        "saved norm": (LoraConfig(**LORA, modules_to_save=["norm"]), 0.1),
        "embedding and head": (LoraConfig(**ADAPTED), 0.1),
        "dora": (LoraConfig(r=4, use_dora=True, target_modules=["embed_tokens", "lm_head"]), 0.1),
        "listed tokens": (LoraConfig(**LORA, trainable_token_indices=TOKENS), 0.3),
        "tokens under a head": (
            LoraConfig(
                r=3, target_modules=["q_proj", "lm_head"], trainable_token_indices=TOKENS[:2]
            ),
            0.3,
        ),
        "trained tokens": (TrainableTokensConfig(token_indices=TOKENS), 0.5),
        "saved rows": (LoraConfig(**LORA, modules_to_save=["embed_tokens", "lm_head"]), 0.3),
        "added": (LoraConfig(**ADAPTED), 0.1),
        "one head for both": (LoraConfig(**ADAPTED, ensure_weight_tying=True), 0.1),
    }
    return made if tied else {name: made[name] for name in list(made)[:-1]}


def base(name: str, added: int = 0) -> torch.nn.Module:
    """The base of these tenants, resized."""
    model = base_model(name)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
                parameter[[1, 40]] = 0
    if added:
        torch.manual_seed(9)
        model.resize_token_embeddings(VOCAB + added, mean_resizing=False)
    return model.eval()


def build(folder: Path, name: str) -> dict[str, Path]:
    """The base under "base", and a folder for each adapter."""
    base(name).save_pretrained(folder / "base")
    made = recipes(name == "tied")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, (tenant, (config, scale)) in enumerate(made.items()):
            _save(config, name, folder / tenant, ADDED * (tenant == "added"), seed, scale)
    return {tenant: folder / tenant for tenant in ["base", *made]}


def _save(config, name: str, folder: Path, added: int, seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    model = base(name, added)
    if added:  # rows of about the size of the others, so that they are generated
        with torch.no_grad():
            for module in (model.get_input_embeddings(), model.get_output_embeddings()):
                module.weight[VOCAB:] = 1.5 * module.weight[:ADDED] + 0.1
    model = get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = scale * torch.randn(parameter.shape)
                if "modules_to_save" in key and parameter.ndim == 2:
                    kept = torch.zeros(len(parameter), 1)
                    kept[TOKENS] = 1
                    noise = noise * kept
                parameter.add_(noise)
    model.save_pretrained(folder, **({"save_embedding_layers": True} if added else {}))


def oracle(folders: dict[str, Path], name: str, tenant: str | None) -> torch.nn.Module:
    """The base, or the base with an adapter as PEFT loads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = base(name, ADDED * (tenant == "added"))
        if tenant is None:
            return model
        return PeftModel.from_pretrained(model, str(folders[tenant])).eval()


def merged(folders: dict[str, Path], name: str, stack: list[str]) -> torch.nn.Module:
    """The base with each adapter merged into it by PEFT, one after the other."""
    model = base(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for tenant in stack:
            model = PeftModel.from_pretrained(model, str(folders[tenant])).merge_and_unload()
    return model.eval()
