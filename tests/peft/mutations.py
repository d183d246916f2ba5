"""Ways in which a checkpoint is damaged, rewritten or put on another base, drawn at random.

Each mutation changes the folder of a `Case`, and may say by `blame` what a refusal has to name.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from peft_oracle import torch
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import CONFIGS

BASE = "biased"
# What the names of the tensors of a method start with.
PREFIXES = "lora|ia3|vera|oft|ssf|hada|lokr|hra|delora|miss|vblora|gralora|psoft|unilora|deft|glora"
CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


@dataclass
class Case:
    """A checkpoint under a mutation, and what an error has to name."""

    folder: Path
    rng: np.random.Generator
    base: str = BASE
    names: str = "adapter_model|adapter_config"  # pattern that a refusal has to match

    def tensors(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / TENSORS)

    def save(self, tensors: dict[str, np.ndarray]) -> None:
        arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(arrays, self.folder / TENSORS)

    def config(self) -> dict:
        return json.loads((self.folder / CONFIG).read_text())

    def pick(self, values: Iterable[Any]) -> Any:
        values = list(values)
        return values[self.rng.integers(len(values))]

    def blame(self, *names: str) -> None:
        self.names = "|".join(re.escape(name) for name in names)


MUTATIONS: list[Callable[[Case], None]] = []


def mutation(function: Callable[[Case], None]) -> Callable[[Case], None]:
    MUTATIONS.append(function)
    return function


@mutation
def truncate_the_tensors(case: Case):
    content = (case.folder / TENSORS).read_bytes()
    (case.folder / TENSORS).write_bytes(content[: case.rng.integers(len(content))])
    case.blame(TENSORS)


@mutation
def change_bytes_of_the_header(case: Case):
    content = bytearray((case.folder / TENSORS).read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(case.rng.integers(1, 4)):
        content[case.rng.integers(8 + length)] = case.rng.integers(256)
    (case.folder / TENSORS).write_bytes(content)


@mutation
def truncate_the_config(case: Case):
    text = (case.folder / CONFIG).read_text()
    (case.folder / CONFIG).write_text(text[: case.rng.integers(len(text) - 1)])
    case.blame(CONFIG)


@mutation
def remove_a_file(case: Case):
    (case.folder / case.pick([CONFIG, TENSORS])).unlink()
    case.blame(CONFIG, TENSORS)


@mutation
def change_a_shape(case: Case):
    tensors = case.tensors()
    key = case.pick(tensors)
    array = tensors[key]
    tensors[key] = case.pick(
        [array[:-1], np.concatenate([array, array[:1]]), array[None], array.reshape(-1), array.T]
    )
    case.save(tensors)
    case.blame(key)


@mutation
def change_a_dtype(case: Case):
    tensors = case.tensors()
    key = case.pick(tensors)
    dtype = case.pick([np.float16, np.float64, np.int32, np.int8, np.bool_, ml_dtypes.bfloat16])
    if dtype is ml_dtypes.bfloat16:
        from safetensors.torch import save_file as save_torch

        arrays = {name: torch.tensor(array) for name, array in tensors.items()}
        save_torch(arrays | {key: arrays[key].bfloat16()}, case.folder / TENSORS)
    else:
        case.save(tensors | {key: tensors[key].astype(dtype)})
    case.blame(key)


@mutation
def drop_tensors(case: Case):
    tensors = case.tensors()
    gone = {case.pick(tensors) for _ in range(case.rng.integers(1, 4))}
    case.save({name: array for name, array in tensors.items() if name not in gone})
    case.blame(*gone)


@mutation
def add_a_tensor(case: Case):
    tensors = case.tensors()
    key = case.pick(tensors)
    added = case.pick(
        [
            key.replace("down_proj", "up_proj")
            .replace("q_proj", "k_proj")
            .replace("v_proj", "o_proj"),
            key.replace("layers.1", "layers.7").replace("layers.0", "layers.6"),
            key + "_more",
            "base_model.extra",
            "extra",
            "base_model.model.lm_head.weight",
            "base_model.model.model.norm.weight",
        ]
    )
    case.save({**tensors, added: tensors[key]} if added not in tensors else tensors)
    case.blame(added)


@mutation
def put_in_a_number_that_is_none(case: Case):
    tensors = case.tensors()
    key = case.pick(key for key, array in tensors.items() if array.dtype.kind == "f")
    array = tensors[key].copy()
    array.reshape(-1)[case.rng.integers(array.size)] = case.pick([np.nan, np.inf, -np.inf])
    case.save(tensors | {key: array})
    case.blame(key)


@mutation
def rename_a_key(case: Case):
    tensors = case.tensors()
    key = case.pick(tensors)
    at = case.rng.integers(len(key))
    renamed = case.pick(
        [
            key[:at] + "x" + key[at:],
            key[:at] + key[at + 1 :],
            key.replace(".weight", ""),
            key + ".weight",
            key.removeprefix("base_model.model."),
            key.replace(".lora_A.", ".lora_A.default."),
            key.upper(),
        ]
    )
    case.save({renamed if name == key else name: array for name, array in tensors.items()})
    case.blame(key, renamed)


@mutation
def rename_all_keys(case: Case):
    def default(key: str) -> str:
        own = re.search(rf"\.({PREFIXES})_[a-zA-Z_]+", key)
        return key if own is None else f"{key[: own.end()]}.default{key[own.end() :]}"

    rename = case.pick(
        [
            lambda key: key.removeprefix("base_model.model."),
            default,
            lambda key: key.replace("model.model.", "model.model.model."),
            lambda key: key.replace("base_model.", ""),
            lambda key: key.replace("self_attn", "attn"),
        ]
    )
    case.save({rename(key): array for key, array in case.tensors().items()})


@mutation
def exchange_tensors_of_one_shape(case: Case):
    tensors = case.tensors()
    key = case.pick(tensors)
    other = case.pick(k for k in tensors if tensors[k].shape == tensors[key].shape)
    case.save(tensors | {key: tensors[other], other: tensors[key]})


@mutation
def change_numbers(case: Case):
    tensors = case.tensors()
    key = case.pick(tensors)
    scale = np.float32(case.pick([0.0, -1.0, 1e-3, 3.0, 1e30, 1e38]))
    with np.errstate(over="ignore"):
        case.save(tensors | {key: tensors[key] * scale})
    case.blame(key, "normal form", "norm", "peft_version", "save_projection")
    case.names += r"|hra_u|delora_A|deft_P|vblora_logits_[AB]"


@mutation
def drop_a_field(case: Case):
    config = case.config()
    field = case.pick(config)
    del config[field]
    (case.folder / CONFIG).write_text(json.dumps(config))


@mutation
def change_a_field(case: Case):
    config = case.config()
    field = case.pick(config)
    values = [None, True, False, 0, 1, 2, -1, 0.5, 1e300, "", "x", "all", [], ["q_proj"], [1], {}]
    values += [
        {"q_proj": 3},
        "(",
        ".*",
        r".*\.q_proj",
        "0.17.0",
        "LORA",
        10**30,
        [None],
        float("nan"),
    ]
    config[field] = case.pick(values)
    (case.folder / CONFIG).write_text(json.dumps(config))


@mutation
def add_a_field(case: Case):
    name = case.pick(
        ["new_scale", "target_parameters", "exclude_modules", "modules_to_save", "bias"]
    )
    name = case.pick([name, "use_dora", "trainable_token_indices", "layers_pattern", "eps", "r"])
    value = case.pick([None, False, [], {}, 1, True, "x", ["v_proj"], {"v_proj": 2}, 2.5])
    (case.folder / CONFIG).write_text(json.dumps(case.config() | {name: value}))


@mutation
def use_another_base(case: Case):
    case.base = case.pick(name for name in CONFIGS if name != BASE)


@mutation
def save_as_bin(case: Case):
    tensors = {name: torch.tensor(array) for name, array in case.tensors().items()}
    path = case.folder / PICKLED
    (case.folder / TENSORS).unlink()
    kind = case.pick(["whole", "truncated", "changed", "legacy", "code"])
    if kind == "code":
        torch.save({**tensors, "f": print}, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind != "legacy")
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        content = content[: case.rng.integers(len(content))]
    if kind == "changed":
        content[case.rng.integers(min(len(content), 1500))] ^= 1 + case.rng.integers(255)
    path.write_bytes(content)
