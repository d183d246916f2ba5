"""From a folder, a GGUF file or a hub id to a configuration and its weights.

    load_model -> local_path -> open_folder | open_gguf -> build_params

Both kinds of checkpoint are opened as a TensorSource, which names tensors and lays them out as
Hugging Face does; one builder turns it into the pytree, a tensor at a time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from scute_jax.models.config import LlamaConfig
from scute_jax.models.errors import ModelError
from scute_jax.models.folder import open_folder
from scute_jax.models.gguf import open_gguf
from scute_jax.models.hub import local_path
from scute_jax.models.params import LlamaParams
from scute_jax.models.tensors import TensorSource, build_params

DTypeName = Literal["float32", "bfloat16", "float16"]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def load_model(
    path: str | Path,
    dtype: DTypeName | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[LlamaConfig, LlamaParams]:
    """The configuration and weights at a Hugging Face folder, a GGUF file or a hub id.

    Dtypes: every array has `dtype`; None takes that of the stored embedding (float32 where a GGUF
    file stores it quantised). Memory: beyond the weights, one tensor at a time.
    progress(tensor, done, total) is called after each tensor, in bytes of the loaded weights.
    Raises: ModelError for anything that cannot be served exactly, before any weight is read where
    possible.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}, but served are {', '.join(DTYPES)} or None.")
    config, source = open_model(local_path(path))
    return config, build_params(config, source, None if dtype is None else DTYPES[dtype], progress)


def open_model(path: Path) -> tuple[LlamaConfig, TensorSource]:
    """The configuration of a file or folder and its tensors, none of them read yet."""
    file = gguf_file(path)
    return open_folder(path) if file is None else open_gguf(file)


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is or holds; None for a folder of Hugging Face files.

    Raises: ModelError if a folder holds several, or neither kind of checkpoint.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{path}: a single file must be a GGUF file; name the folder that holds "
                "config.json and the safetensors files instead."
            )
        return path
    files = sorted(path.glob("*.gguf"))
    if any(path.glob("*.safetensors")) or not files:
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ModelError(f"{path}: holds {len(files)} GGUF files ({names}); name one of them.")
    return files[0]
