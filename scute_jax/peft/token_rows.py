"""Trained tokens: rows of the embedding, and of the head, that replace those of the base.

TRAINABLE_TOKENS is a method of its own, trainable_token_indices a field of LoRA. The file holds
the rows themselves (trainable_tokens_delta [k, d], no differences), the config their ids. Where
embedding and head are tied, rows of the embedding are rows of the head, unless the field names both
with different ids. Source: PEFT 0.21, tuners/trainable_tokens and set_additional_trainable_modules
of utils/other.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from scute_jax.errors import AdapterError
from scute_jax.normal_form import NormalForm, TokenRows
from scute_jax.peft.base import EMBEDDING, HEAD
from scute_jax.peft.names import PREFIX
from scute_jax.peft.options import Options
from scute_jax.peft.registry import register
from scute_jax.peft.site import Reading, Site
from scute_jax.stack import stack

DELTA = "trainable_tokens_delta"
FIELD = "trainable_token_indices"


@register(
    "TRAINABLE_TOKENS", live=("rows",), also=("embedding",), inert=["init_weights"],
    replaces_bias=False,
)  # fmt: skip
def trainable_tokens(site: Site) -> NormalForm:
    """own rows of embed_tokens and lm_head"""
    if site.module not in (EMBEDDING, HEAD):
        site.refuse(
            "trained tokens of a module that is neither embed_tokens nor lm_head are not served; "
            "correct target_modules."
        )
    ids = token_ids(site.option("token_indices"), "token_indices", site.refuse_field)
    shape = (len(ids), site.base.hidden)
    tied = site.base.tied and any(p.module == EMBEDDING for p in site.targets)
    rows = site.tensor(DELTA, shape, optional=tied and site.module == HEAD)
    if tied:
        first = site.once(DELTA, lambda: rows)
        again = site.tensor(f"base_layer.{DELTA}", shape, optional=True)
        for other in (rows, again):
            if other is not None and not np.array_equal(other, first):
                site.refuse(f"{DELTA} is not that of embed_tokens, to which the head is tied.")
        rows = first
    return NormalForm(rows=TokenRows(ids, rows))


def listed_rows(reading: Reading) -> Iterator[tuple[str, NormalForm]]:
    """(site, rows) of the tokens that the field trainable_token_indices lists."""
    options, base = reading.options, reading.base
    value = options.get(FIELD)
    if not value:
        return
    lists = _lists(value, reading)
    ids = {m: token_ids(each, FIELD, options.refuse) for m, each in lists.items()}
    targets = {p.module for p in reading.targets}
    if odd := targets & set(ids):
        options.refuse(FIELD, f"{', '.join(odd)} is adapted besides, which PEFT does not allow")
    same = len({tuple(each) for each in ids.values()}) == 1
    ensured = options.get("ensure_weight_tying", False, kind=bool)
    if base.tied and ensured and not same:
        options.refuse(FIELD, "ensure_weight_tying needs the same tokens of embedding and head")
    tied = base.tied and EMBEDDING in ids and same
    if tied:
        ids[HEAD] = ids[EMBEDDING]
    first = None
    for module, own in ids.items():
        key = reading.names.modules.get(module, {}).get(f"token_adapter.{DELTA}")
        wanted = f"{PREFIX}{module}.token_adapter.{DELTA}"
        shape = (len(own), base.hidden)
        rows = reading.tensor(key, wanted, (shape,), tied and module == HEAD, False)
        first = rows if first is None else first
        if tied and rows is not None and not np.array_equal(rows, first):
            raise AdapterError(
                f"{reading.tensors.path}: tensor {key!r} is not that of embed_tokens, to which "
                "the head is tied; save the adapter again."
            )
        yield (
            module.removeprefix("model."),
            NormalForm(rows=TokenRows(own, first if tied else rows)),
        )


def token_ids(value: Any, field: str, refuse) -> np.ndarray:
    """The ids of a list in the config. Raises: AdapterError unless they are different token ids."""
    whole = isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)
    if not whole or not value or len(set(value)) < len(value):
        refuse(field, "needed a list of different token ids")
    return np.asarray(value, np.int32)


def _lists(value: Any, reading: Reading) -> dict[str, Any]:
    """Module -> ids; a bare list is that of the embedding."""
    if not isinstance(value, dict):
        return {EMBEDDING: value}
    found: dict[str, Any] = {}
    for name, ids in value.items():
        named = [p.module for p in reading.base.modules if p.module.endswith(name)]
        if len(named) != 1 or named[0] not in (EMBEDDING, HEAD) or named[0] in found:
            reading.options.refuse(FIELD, f"{name!r} is neither embed_tokens nor lm_head")
        found[named[0]] = ids
    return {module: found[module] for module in (EMBEDDING, HEAD) if module in found}


def over_rows(form: NormalForm, rows: TokenRows, name: str) -> NormalForm:
    """The form over a base in which rows are replaced.

    The rows of a form replace all else, so what its terms do to these tokens goes into them.
    Raises: AdapterError if other slots act on them.
    """
    if set(form.live) - {"rows"} or len(form.terms) > 1:
        raise AdapterError(
            f"{name}: it replaces rows of the vocabulary under an adapter that is more than a "
            "plain LoRA, which is not served; train one without the other."
        )
    own = np.asarray(rows.rows, np.float32)
    for term in form.terms:
        if name == "lm_head":
            own = own + np.float32(term.c) * (term.A @ term.B[:, rows.ids]).T
        else:
            own = own + np.float32(term.c) * (term.A[rows.ids] @ term.B)
    replaced: Any = stack(NormalForm(rows=TokenRows(rows.ids, own)), NormalForm(rows=form.rows))
    return replace(form, rows=replaced.rows)


def cut(form: NormalForm, vocab: int, name: str) -> NormalForm:
    """The form of a resized embedding or head without what terms do to tokens past the base's."""
    sides = [
        replace(t, B=t.B[:, :vocab]) if name == "lm_head" else replace(t, A=t.A[:vocab])
        for t in form.terms
    ]
    return replace(form, terms=tuple(sides))


def check_added(sites: dict[str, NormalForm], vocab: int, options: Options) -> None:
    """Raises AdapterError unless embedding and head agree in the tokens past the base's."""
    added = {
        name: sorted(i for i in (() if form.rows is None else form.rows.ids.tolist()) if i >= vocab)
        for name, form in ((n, sites.get(n, NormalForm())) for n in ("embed_tokens", "lm_head"))
    }
    both = added["embed_tokens"], added["lm_head"]
    if both[0] != both[1] or both[0] != list(range(vocab, vocab + len(both[0]))):
        shown = ", ".join(f"{name} has {ids[:5]}" for name, ids in added.items())
        raise AdapterError(
            f"{options.path}: it adds tokens to the {vocab} of the base, and the file has to hold "
            f"each of their rows for embedding and head, but {shown}; train both (for example "
            "trainable_token_indices={'embed_tokens': ids, 'lm_head': ids}), or save with "
            "save_embedding_layers=True."
        )
