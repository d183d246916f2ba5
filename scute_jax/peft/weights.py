"""The base's own weights, for methods whose normal form depends on them; looked up on demand.

`params` is one of: an object with `linear(site)` (models.params.LlamaParams), a mapping of Hugging
Face tensor names to arrays in torch's layout [d_out, d_in], or the folder of a model. Arrays of any
library and float type do, torch tensors included; they become numpy float32 when they are used.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from scute_jax.errors import AdapterError
from scute_jax.peft.base import EMBEDDING, HEAD, Base, Projection
from scute_jax.peft.safetensors_file import SafetensorsFile

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class BaseWeights:
    """Weights and biases of the base by projection, in the layout of the normal form."""

    def __init__(self, params: Any, base: Base):
        self._base, self._params = base, params
        self._linear: Any = getattr(params, "linear", None)
        self._lookup: Any = None
        if isinstance(params, str | os.PathLike):
            self._lookup = _folder(Path(params))
        elif isinstance(params, Mapping):
            self._lookup = params.get
        elif params is not None and self._linear is None:
            raise TypeError(
                f"params is a {type(params).__name__}; needed LlamaParams, a mapping of Hugging "
                "Face tensor names to arrays, or the path of a model folder."
            )

    def weight(self, projection: Projection, why: str) -> Float[Any, "d_in d_out"]:
        """W of y = x W + bias, as params holds it. `why` says in messages what it is needed for.

        Raises: AdapterError if params was not given, lacks it or holds another shape.
        """
        self._check_given(projection.module, "weight", why)
        if projection.module == EMBEDDING:
            found = self.module_weight(EMBEDDING, why, as_held=True)
        elif self._linear is not None:
            found = self._by_site(projection).weight
        else:
            found = self._find(f"{self._untied(projection.module)}.weight")
            found = None if found is None else found.T
        return _checked(found, (projection.d_in, projection.d_out), f"{projection.module}.weight")

    def bias(self, projection: Projection, why: str) -> Float[np.ndarray, "d_out"] | None:
        """The bias, or None where the base has none."""
        if not projection.has_bias:
            return None
        self._check_given(projection.module, "bias", why)
        if self._linear is not None:
            found = self._by_site(projection).bias
        else:
            found = self._find(f"{projection.module}.bias")
        return as_float32(_checked(found, (projection.d_out,), f"{projection.module}.bias"))

    def module_weight(self, module: str, why: str, as_held: bool = False) -> Any:
        """The weight of any module in torch's layout, None if params lacks it.

        Numpy float32, or the array of params itself (`as_held`).
        """
        self._check_given(module, "weight", why)
        module = self._untied(module)
        if self._linear is None:
            found = self._find(f"{module}.weight")
        elif module == EMBEDDING:
            found = self._params.embed_tokens
        elif any(module == norm.module for norm in self._base.norms):
            found = self._params.norm_weight(module.removeprefix("model."))
        else:
            projection = next((p for p in self._base.projections if p.module == module), None)
            found = None if projection is None else self._by_site(projection).weight.T
        return found if as_held or found is None else as_float32(found)

    def _untied(self, module: str) -> str:
        """The module whose weight this one uses."""
        return EMBEDDING if module == HEAD and self._base.tied else module

    def _by_site(self, projection: Projection) -> Any:
        try:
            return self._linear(projection.site)
        except KeyError:
            raise AdapterError(
                f"params has no {projection.site!r}, but the base's config has: params and config "
                "belong to different models."
            ) from None

    def _find(self, name: str) -> Any:
        found = self._lookup(name)
        return self._lookup(name.removeprefix("model.")) if found is None else found

    def _check_given(self, module: str, what: str, why: str) -> None:
        if self._params is None:
            raise AdapterError(
                f"{module}: the base's own {what} is needed: {why}. Pass params= to load_peft: the "
                "model's LlamaParams, a mapping of its tensor names to arrays, or its folder."
            )


def as_float32(array: Any) -> np.ndarray:
    """Any library's float array as numpy float32; torch tensors without importing torch."""
    if hasattr(array, "detach"):  # torch; its bfloat16 has no numpy twin, so torch casts
        array = array.detach().cpu().float().numpy()
    return np.asarray(array, dtype=np.float32)


def _checked(found: Any, shape: tuple[int, ...], name: str) -> Any:
    if found is None:
        raise AdapterError(f"params has no tensor {name!r}; pass the weights of the whole base.")
    if tuple(found.shape) != shape:
        raise AdapterError(
            f"params holds {name!r} of shape {tuple(found.shape)} (as [d_in, d_out]), but the "
            f"base's config says {shape}: params and config belong to different models."
        )
    return found


def _folder(folder: Path) -> Callable[[str], np.ndarray | None]:
    """Reads single tensors from a model folder with one safetensors file or several."""
    if (folder / INDEX).is_file():
        try:
            shards = dict(json.loads((folder / INDEX).read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AdapterError(f"{folder / INDEX}: no index of tensors ({error!r}).") from None
    elif (folder / SINGLE).is_file():
        shards = dict.fromkeys(SafetensorsFile(folder / SINGLE).shapes, SINGLE)
    else:
        raise AdapterError(
            f"{folder}: params names a folder without {SINGLE} or {INDEX}; pass a model folder "
            "with safetensors, or the weights themselves."
        )
    files: dict[str, SafetensorsFile] = {}

    def lookup(name: str) -> np.ndarray | None:
        shard = shards.get(name)
        if shard is None:
            return None
        if shard not in files:
            files[shard] = SafetensorsFile(folder / shard)
        return files[shard].read(name) if name in files[shard].shapes else None

    return lookup
