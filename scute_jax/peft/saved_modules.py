"""Weights that the file holds whole: copies of the base's, and modules that were trained besides.

PEFT loads a copy ("weight", under a wrapper "base_layer.weight") over the base's own, and puts a
module of `modules_to_save` in the place of the base's. Served is what has a normal form:

    a norm      y = base(x) * s + x S,  s = own / base, S = own - base where base is (nearly) 0
    embed_tokens, lm_head               rows = those that differ from the base, those it lacks

Where base and head are tied, a copy of either is a copy of both; modules_to_save unties them,
unless ensure_weight_tying is set. Source: PEFT 0.21, ModulesToSaveWrapper of utils/other.py.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from scute_jax.errors import AdapterError
from scute_jax.normal_form import NormalForm, Sparse, TokenRows
from scute_jax.peft.base import EMBEDDING, HEAD, Projection
from scute_jax.peft.registry import Method
from scute_jax.peft.site import Reading
from scute_jax.peft.tying import ties_saved
from scute_jax.peft.weights import as_float32

# Names under which PEFT saves the weight of a module, by whether it is the base's or trained.
FROZEN = ("base_layer.weight", "original_module.weight", "token_adapter.base_layer.weight")
TRAINED = ("weight", "modules_to_save.weight")
VOCABULARY = (EMBEDDING, HEAD)
ROWS = 4096  # rows of a weight compared at a time
SHARE = 4  # at most one row in so many may differ
STEEPEST = 1024.0  # largest s of a norm; half precision ends at 65504


def file_vocab(reading: Reading) -> int:
    """The tokens of the model that was trained: those of the base, or more after a resize.

    Raises: AdapterError if it has fewer, or weights of different sizes.
    """
    keys = [
        key
        for module in VOCABULARY
        for name, key in reading.names.modules.get(module, {}).items()
        if name in (*FROZEN, *TRAINED) and reading.tensors.shapes[key]
    ]
    sizes = {reading.tensors.shapes[key][0]: key for key in keys}
    base = reading.base.vocab
    if len(sizes) > 1 or any(size < base for size in sizes):
        found = ", ".join(f"{key!r} (vocab {size} vs {base})" for size, key in sizes.items())
        raise AdapterError(
            f"{reading.tensors.path}: {found}: an adapter may add tokens behind the {base} of the "
            "base, the same number to embedding and head, and take none away."
        )
    return next(iter(sizes), base)


def refuse_resized(reading: Reading, method: Method, vocab: int) -> None:
    """Raises AdapterError for an adapter of a resized embedding or head that is no plain LoRA."""
    adapted = [p.module for p in reading.targets if p.module in VOCABULARY]
    if vocab != reading.base.vocab and adapted and method.name not in ("LORA", "TRAINABLE_TOKENS"):
        raise AdapterError(
            f"{reading.tensors.path}: {adapted[0]} was resized to {vocab} tokens (the base has "
            f"{reading.base.vocab}) and adapted by {method.name}; there a plain LoRA is served."
        )


def saved_forms(reading: Reading, vocab: int) -> Iterator[tuple[str, NormalForm]]:
    """(site, form) of every module whose weight in the file is not the base's own.

    Raises: AdapterError for a weight that has no normal form; what is missing is noted.
    """
    trained = trained_modules(reading)
    adapted_norms = set(reading.targets) & set(reading.base.norms)  # they have their own already
    for module in reading.base.modules:
        if module.module in VOCABULARY or module in adapted_norms:
            continue
        names = TRAINED if module.module in trained else (TRAINED[0], FROZEN[0])
        shape = (module.d_in,) if module in reading.base.norms else (module.d_out, module.d_in)
        found = _weight(reading, module, names, shape, module.module in trained)
        if found is not None:
            form = _form(reading, module, *found)
            if form.live:
                yield module.site, form
    for module in (reading.base.embedding, reading.base.projections[-1]):
        rows = _vocabulary_rows(reading, module, vocab, trained)
        if rows is not None:
            yield module.site, NormalForm(rows=rows)


def trained_modules(reading: Reading) -> frozenset[str]:
    """The modules that modules_to_save replaces: it names ends of paths, also those of parents."""
    names = reading.options.names("modules_to_save") or ()
    found = {
        p.module
        for p in reading.base.modules
        if any(parent.endswith(name) for parent in _parents(p.module) for name in names)
    }
    tied = ties_saved(reading.options, reading.base)
    return frozenset(found | set(VOCABULARY)) if tied else frozenset(found)


def _parents(module: str) -> list[str]:
    """The module's path and those of the modules around it."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _weight(
    reading: Reading, module: Projection, names: tuple[str, ...], shape: tuple, needed: bool = False
) -> tuple[str, np.ndarray] | None:
    """The key and the array under the names of a module, which have to agree."""
    held = reading.names.modules.get(module.module, {})
    keys = [held[name] for name in names if name in held]
    if not keys and needed:
        reading.tensor(None, f"base_model.model.{module.module}.weight", (shape,), False, False)
    return _agreeing(reading, keys, shape)


def _agreeing(reading: Reading, keys: list[str], shape: tuple) -> tuple[str, np.ndarray] | None:
    if not keys:
        return None
    read: list[Any] = [reading.tensor(key, key, (shape,), False, False) for key in keys]
    first, *others = read
    for key, other in zip(keys[1:], others, strict=True):
        if not np.array_equal(first, other):
            raise AdapterError(
                f"{reading.tensors.path}: tensors {keys[0]!r} and {key!r} are one weight of the "
                "trained model, but differ in the file; save it again."
            )
    return keys[0], first


def _form(reading: Reading, module: Projection, key: str, own: np.ndarray) -> NormalForm:
    """The form of a norm; of a projection the identity, or a refusal."""
    base = _base_weight(reading, module.module, key)
    if base.ndim == 1:
        return norm_form(own, as_float32(base))
    if off := max(off for _, off in _differences(own, base)):
        raise AdapterError(
            f"{reading.tensors.path}: {_field(reading)}tensor {key!r} is not the base's own weight "
            f"(it differs by up to {off}); a whole projection of its own is not served beside "
            "other adapters. Train a LoRA in its place, or merge it into a base of its own."
        )
    return NormalForm()


def norm_form(own: Float[np.ndarray, "d"], base: Float[np.ndarray, "d"]) -> NormalForm:
    """s and S of a norm whose weight is `own` in place of `base`."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = own / base
    s = np.where(np.abs(ratio) <= STEEPEST, ratio, 1).astype(np.float32)
    rest = np.where(np.abs(ratio) <= STEEPEST, 0, own - base)
    (at,) = np.nonzero(rest)
    at = at.astype(np.int32)
    S = Sparse(at, at, rest[at].astype(np.float32)) if at.size else None
    return NormalForm(s=s if (s != 1).any() else None, S=S)


def _vocabulary_rows(
    reading: Reading, module: Projection, vocab: int, trained: frozenset[str]
) -> TokenRows | None:
    """The rows of the embedding or the head that are not the base's own."""
    shape = (vocab, reading.base.hidden)
    together = [HEAD, EMBEDDING] if reading.base.tied else [module.module]
    if module.module in trained:
        found = _weight(reading, module, TRAINED, shape, needed=True)
        held = reading.names.modules.get(module.module, {})
        reading.used.update(held[name] for name in FROZEN if name in held)  # what it replaces
        if found is not None and ties_saved(reading.options, reading.base):
            held = [reading.names.modules.get(m, {}).get("weight") for m in together]
            found = _agreeing(reading, [key for key in held if key is not None], shape)
    else:
        keys = [
            key
            for m in together
            for name, key in reading.names.modules.get(m, {}).items()
            if name in FROZEN or (name == "weight" and m not in trained)
        ]
        found = _agreeing(reading, keys, shape)
    return None if found is None else _rows(reading, module, *found)


def _rows(reading: Reading, module: Projection, key: str, own: np.ndarray) -> TokenRows | None:
    base, held = reading.base.vocab, _base_weight(reading, module.module, key)
    places = [(place, off) for place, off in _differences(own[:base], held) if off]
    if len(places) * SHARE > base:
        sizes = "" if len(own) == base else f" (vocab {len(own)} vs {base})"
        raise AdapterError(
            f"{reading.tensors.path}: {_field(reading)}tensor {key!r} is not the base's own weight "
            f"(it differs by up to {max(off for _, off in places)}, in {len(places)} of {base} "
            f"rows){sizes}. Served are replaced rows of up to a quarter of the vocabulary; "
            "train a few tokens (trainable_token_indices) or a LoRA of this module, or merge the "
            "adapter into a base of its own. If it was not trained, save again with "
            "save_embedding_layers=False."
        )
    ids = np.asarray([place for place, _ in places] + list(range(base, len(own))), np.int32)
    return TokenRows(ids, own[ids]) if ids.size else None


def _base_weight(reading: Reading, module: str, key: str):
    found = reading.weights.module_weight(
        module, f"the file holds {key!r}, a copy of it where nothing was trained", as_held=True
    )
    if found is None:
        raise AdapterError(f"params has no weight of {module}; pass the weights of the whole base.")
    return found


def _differences(own: np.ndarray, base) -> Iterator[tuple[int, float]]:
    """(row, largest difference) of every row, after rounding to the precision of the base."""
    dtype = np.float32 if hasattr(base, "detach") else np.dtype(base.dtype)
    for i in range(0, len(own), ROWS):
        left = own[i : i + ROWS].astype(dtype).astype(np.float32)
        off = np.abs(left - as_float32(base[i : i + ROWS])).max(axis=1)
        yield from zip(range(i, i + len(off)), off.tolist(), strict=True)


def _field(reading: Reading) -> str:
    names = reading.options.names("modules_to_save")
    return f"field 'modules_to_save' is {list(names)}; " if names else ""
