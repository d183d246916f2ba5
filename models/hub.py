"""A path, or a name on the Hugging Face hub -> a path on this machine."""

import os
import re
from pathlib import Path

import huggingface_hub

from scute_jax.models.errors import ModelError

# What serving reads; weights in other formats would be fetched for nothing.
FILES = ["*.json", "*.safetensors", "*.jinja"]
NOT_FILES = ["original/*", "onnx/*", "consolidated*"]
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def local_path(path: str | Path) -> Path:
    """The existing file or folder that `path` names, fetched from the hub if it is an id there.

    Raises: ModelError if there is none: what was looked for, and why the hub did not have it.
    """
    place = Path(path).expanduser()
    if place.exists():
        return place
    name = str(path)
    if isinstance(path, os.PathLike) or name.endswith(".gguf") or not HUB_ID.fullmatch(name):
        raise ModelError(f"{path}: there is no such file or folder.")
    try:
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=FILES, ignore_patterns=NOT_FILES)
        )
    # The client raises its own errors, those of its network library, and OSError.
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{name}: is no file or folder here, and could not be fetched from the Hugging Face "
            f"hub ({type(error).__name__}: {reason}). Check the spelling, the network and, for a "
            "gated model, your login; or name a folder that holds the files."
        ) from error
