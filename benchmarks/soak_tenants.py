"""A tiny base with a tokenizer, and checkpoints of every method for it, as PEFT writes them."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peft
import torch
from peft.tuners.lora import BdLoraConfig, KasaConfig
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
LORA = {"r": 4, "target_modules": SOME}
FF = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
ALORA, CALL = "alora", [7, 3, 7]  # acts on what comes after these tokens

# Name -> (config, how far its trainable numbers are moved): effects that change every text.
RECIPES: dict[str, tuple[Callable[[], peft.PeftConfig], float]] = {
    "lora": (lambda: peft.LoraConfig(r=4, target_modules=EVERY, init_lora_weights=False), 0.1),
    "lora-r33": (lambda: peft.LoraConfig(r=33, target_modules=EVERY, use_rslora=True), 0.1),
    "dora": (lambda: peft.LoraConfig(r=4, target_modules=EVERY, use_dora=True), 0.1),
    "ia3": (lambda: peft.IA3Config(**FF), 0.3),
    "ia3-out": (lambda: peft.IA3Config(target_modules=EVERY, feedforward_modules=[]), 0.3),
    "vera": (lambda: peft.VeraConfig(r=20, target_modules=SOME), 1.0),
    "oft": (lambda: peft.OFTConfig(oft_block_size=4, target_modules=EVERY), 0.1),
    "oft-12": (lambda: peft.OFTConfig(oft_block_size=12, target_modules=ATTENTION), 0.1),
    "boft": (
        lambda: peft.BOFTConfig(
            boft_block_size=4, boft_n_butterfly_factor=1, target_modules=ATTENTION
        ),
        0.1,
    ),
    "hra": (lambda: peft.HRAConfig(**LORA), 0.3),
    "adalora": (lambda: peft.AdaLoraConfig(init_r=4, total_step=9, target_modules=SOME), 0.3),
    "bdlora": (
        lambda: peft.LoraConfig(
            **LORA,
            use_bdlora=BdLoraConfig(
                target_modules_bd_a=SOME[:2], target_modules_bd_b=SOME[2:], nblocks=2
            ),
        ),
        0.3,
    ),
    "kasa": (lambda: peft.LoraConfig(**LORA, kasa_config=KasaConfig()), 0.2),
    "loha": (lambda: peft.LoHaConfig(r=3, target_modules=SOME), 0.3),
    "lokr": (lambda: peft.LoKrConfig(r=3, target_modules=SOME), 0.3),
    "delora": (lambda: peft.DeloraConfig(**LORA), 0.3),
    "miss": (lambda: peft.MissConfig(**LORA), 0.3),
    "vblora": (
        lambda: peft.VBLoRAConfig(**LORA, num_vectors=5, vector_length=4, topk=3),
        0.5,
    ),
    "gralora": (lambda: peft.GraloraConfig(**LORA, gralora_k=2, hybrid_r=1), 0.3),
    "unilora": (lambda: peft.UniLoraConfig(**LORA, theta_d_length=50), 0.5),
    "tinylora": (lambda: peft.TinyLoraConfig(**LORA, u=3), 0.3),
    "glora": (
        lambda: peft.GloraConfig(**LORA, config_A_B="vector", config_D_E="constant"),
        0.2,
    ),
    "psoft": (lambda: peft.PsoftConfig(**LORA), 0.3),
    "fourierft": (lambda: peft.FourierFTConfig(n_frequency=20, target_modules=SOME), 3.0),
    "randlora": (lambda: peft.RandLoraConfig(r=24, target_modules=["q_proj", "up_proj"]), 0.3),
    "pvera": (lambda: peft.PveraConfig(r=20, target_modules=SOME), 1.0),
    "beft": (lambda: peft.BeftConfig(target_modules=ATTENTION), 0.5),
    "road": (lambda: peft.RoadConfig(group_size=8, target_modules=SOME), 0.1),
    "shira": (lambda: peft.ShiraConfig(r=2, target_modules=SOME), 0.3),
    "waveft": (lambda: peft.WaveFTConfig(n_frequency=60, scaling=1.0, target_modules=SOME), 0.5),
    "ln-tuning": (lambda: peft.LNTuningConfig(target_modules=NORMS), 0.3),
    "tokens": (lambda: peft.TrainableTokensConfig(token_indices=[3, 5, 40]), 1.0),
    ALORA: (
        lambda: peft.LoraConfig(
            r=4, target_modules=EVERY, init_lora_weights=False, alora_invocation_tokens=CALL
        ),
        0.1,
    ),
    "ssf": (lambda: peft.LoraConfig(), 0.3),  # PEFT has none: see `_write_ssf`
}


def write_base(folder: Path, layers: int) -> LlamaForCausalLM:
    """A random Llama whose widths all differ; its tokenizer knows the characters 32 .. 126."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        attention_bias=True,
        mlp_bias=True,
        max_position_embeddings=512,
        eos_token_id=96,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(6)
    model.save_pretrained(folder)
    letters = {chr(code): i for i, code in enumerate(range(32, 127))} | {"<|end|>": 96}
    made = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return model


def write_adapter(base: LlamaForCausalLM, recipe: str, folder: Path, seed: int) -> Path:
    """One checkpoint; its numbers follow from the seed."""
    make, scale = RECIPES[recipe]
    if recipe == "ssf":
        return _write_ssf(base, folder, seed, scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT advises
        torch.manual_seed(seed)
        model = peft.get_peft_model(copy.deepcopy(base), make())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(scale * torch.randn_like(parameter))
        model.save_pretrained(folder)
    return folder


def _write_ssf(base: LlamaForCausalLM, folder: Path, seed: int, scale: float) -> Path:
    rng, tensors = np.random.default_rng(seed), {}
    for name, module in base.named_modules():
        if name.endswith(("k_proj", "up_proj")):
            for part, centre in (("ssf_scale", 1.0), ("ssf_shift", 0.0)):
                vector = centre + scale * rng.normal(size=module.out_features)
                tensors[f"base_model.model.{name}.{part}"] = vector.astype(np.float32)
    folder.mkdir(parents=True)
    config = {"peft_type": "SSF", "target_modules": ["k_proj", "up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
