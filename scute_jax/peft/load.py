"""A PEFT checkpoint as an adapter: folder -> normal forms, whole or not at all.

open the files -> find the method -> place the keys at the base's modules -> resolve the targets
-> one normal form per site -> refuse what is missing or left over -> fold, version
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import jax
import numpy as np

from scute_jax.errors import AdapterError
from scute_jax.fold import fold
from scute_jax.identity import content_version
from scute_jax.normal_form import Adapter, NormalForm, Term
from scute_jax.peft.alora import FIELD as INVOCATION
from scute_jax.peft.arrays import HashedArrays
from scute_jax.peft.base import EMBEDDING, Base
from scute_jax.peft.checkpoint import open_checkpoint
from scute_jax.peft.names import PREFIX, place, some
from scute_jax.peft.registry import Method, method_of
from scute_jax.peft.replaced import bias_shifts, refuse_embedding, refuse_fields
from scute_jax.peft.saved_modules import file_vocab, refuse_resized, saved_forms
from scute_jax.peft.site import Reading, Site
from scute_jax.peft.targets import targeted
from scute_jax.peft.token_rows import check_added, cut, listed_rows, over_rows
from scute_jax.peft.tying import check_tied, tied_targets
from scute_jax.peft.weights import BaseWeights
from scute_jax.slots import check_form
from scute_jax.stack import stack


def load_peft(
    path: str | PathLike,
    config: Any,
    params: Any = None,
    *,
    key_map: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Adapter:
    """The adapter in a folder that PEFT saved, for the base that `config` describes.

    `config` is the base's config.json as a dict or any object with its fields. `params` are the
    base's weights (models.params.LlamaParams, a mapping of Hugging Face tensor names to arrays, or
    the model's folder); only methods whose normal form depends on them look at them. `key_map`
    renames modules (pattern -> replacement) in files of trainers that call them differently.
    `options` states fields of adapter_config.json that the file lacks, such as the task of an
    adapter that mixes its parts per task: options={"task_id": 3}.
    Nothing is downloaded: base_model_name_or_path is a hint for people.

    Dtypes: the arrays of the result are numpy float32, as PEFT itself computes adapters.
    Raises: AdapterError for a checkpoint that is damaged, incomplete, made for another base, or
    not understood in full; ValueError if `config` describes no model that is served.
    """
    base = Base.from_config(config)
    stated, tensors = open_checkpoint(path)
    stated = stated.completed(options or {})
    method = method_of(stated)
    names = place(tensors.shapes, base, tensors.path, key_map)
    reading = Reading(stated, tensors, names, base, BaseWeights(params, base), targets=())
    refuse_fields(reading, method)
    targets = set(targeted(stated, base, norms="norms" in method.also))
    targets |= tied_targets(stated, base, targets)
    if EMBEDDING in targets and "embedding" not in method.also:
        refuse_embedding(reading)
    vocab = file_vocab(reading)
    reading.targets = tuple(p for p in base.resized(vocab).modules if p.module in targets)
    refuse_resized(reading, method, vocab)
    check_tied(reading)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by name
        forms = _forms(reading, method)
        _add_replaced(forms, reading, method, vocab)
        _refuse_incomplete(reading, method)
        sites = {name: _on_host(form, name, reading) for name, form in forms.items()}
    invocation = _invocation(reading, method)
    return Adapter(
        sites=sites,
        method=method.name,
        version=content_version((*_content(sites), *(f"from {t}" for t in invocation))),
        metadata=(
            ("peft_type", method.peft_type),
            ("config", json.dumps(dict(stated.fields), sort_keys=True)),
            ("notes", tuple(reading.notes)),
            (
                "widths",
                tuple((site, *width) for site, width in base.widths.items() if site in sites),
            ),
            *((name, HashedArrays(arrays)) for name, arrays in reading.kept.items()),
        ),
        invocation=invocation,
    )


def _forms(reading: Reading, method: Method) -> dict[str, NormalForm]:
    """Site -> normal form as the method gives it, with replaced biases added."""
    forms = {}
    for projection in reading.targets:
        try:
            forms[projection.site] = method.form(Site(reading, projection))
        except AdapterError:
            # Zeros stand in for what is missing: what a method says of them is not the news.
            if not reading.missing:
                raise
    for site, shift in bias_shifts(reading, method).items():
        form = forms.get(site, NormalForm())
        forms[site] = replace(form, b=shift if form.b is None else form.b + shift)
    return forms


def _add_replaced(
    forms: dict[str, NormalForm], reading: Reading, method: Method, vocab: int
) -> None:
    """Brings weights that the file holds whole, and rows of the vocabulary, into the forms."""
    rows: dict[str, NormalForm] = {}
    for site, form in (*saved_forms(reading, vocab), *listed_rows(reading)):
        if method.variant == INVOCATION:
            reading.options.refuse(
                INVOCATION, f"the file changes {site} besides, which would act on all tokens"
            )
        if form.rows is None:
            forms[site] = form
        else:
            rows[site] = stack(rows.get(site, NormalForm()), form)
    if reading.missing:
        return
    for site, replaced in rows.items():
        form = over_rows(forms.get(site, NormalForm()), replaced.rows, site)
        forms[site] = cut(form, reading.base.vocab, site)
    check_added(forms, reading.base.vocab, reading.options)


def _invocation(reading: Reading, method: Method) -> tuple[int, ...]:
    """The token ids after which an activated LoRA acts; none for all other methods."""
    if method.variant != INVOCATION:
        return ()
    value, vocab = reading.options.get(INVOCATION), reading.base.vocab
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < vocab for i in value):
        reading.options.refuse(INVOCATION, f"needed a list of token ids below {vocab}")
    return tuple(value)


def _refuse_incomplete(reading: Reading, method: Method) -> None:
    """Raises AdapterError with all that is missing, all tensors and all fields that nobody used."""
    path, problems = reading.tensors.path, []
    unknown = reading.names.unknown
    placed = reading.used.union(unknown)
    left = [key for key in reading.tensors.shapes if key not in placed]
    for keys, problem in (
        (reading.missing, "missing"),
        (unknown, "at modules that this base does not have"),
        (left, "of no use"),
    ):
        if keys:
            problems.append(f"{len(keys)} tensor(s) {problem}: {some(keys)}")
    if problems:
        modules = some((PREFIX + p.module for p in reading.targets), 3)
        raise AdapterError(
            f"{path}: {'; '.join(problems)}. The config adapts {modules}. A checkpoint is served "
            "whole or not at all: restore what is missing, and drop or explain (target_modules) "
            "what is of no use."
        )
    fields = reading.options.unexplained(method.inert)
    if fields:
        shown = ", ".join(f"{name}={reading.options.fields[name]!r:.60}" for name in fields[:5])
        raise AdapterError(
            f"{reading.options.path}: {len(fields)} field(s) of unknown meaning: {shown}. They may "
            "change the function of the adapter; remove those that do not."
        )
    if idle := reading.options.idle():
        raise AdapterError(
            f"{reading.options.path}: options= states {some(idle)}, which no {method.name} adapter "
            "reads; leave it out."
        )


def _on_host(form: NormalForm, name: str, reading: Reading) -> NormalForm:
    """The folded form with numpy float32 arrays, checked to fit the site and to be finite."""
    check_form(form, *reading.base.widths[name], name)
    form = fold(
        NormalForm(
            R=_array(form.R),
            s=_array(form.s),
            b=_array(form.b),
            terms=tuple(map(_term_on_host, form.terms)),
            P=tuple(replace(blocks, values=_array(blocks.values)) for blocks in form.P),
            Q=tuple(replace(blocks, values=_array(blocks.values)) for blocks in form.Q),
            S=None if form.S is None else replace(form.S, values=_array(form.S.values)),
            K=tuple(replace(k, left=_array(k.left), right=_array(k.right)) for k in form.K),
            rows=None if form.rows is None else replace(form.rows, rows=_array(form.rows.rows)),
        )
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(form):
        if not np.isfinite(leaf).all():
            raise AdapterError(
                f"{reading.tensors.path}: {name}: {jax.tree_util.keystr(path)} of the normal form "
                "is not finite; the factors or the scale of this adapter exceed float32."
            )
    return form


def _term_on_host(term: Term) -> Term:
    A, B, d, e, u = map(_array, (term.A, term.B, term.d, term.e, term.u))
    return replace(term, A=A, B=B, c=float(term.c), d=d, e=e, u=u)


def _array(slot: Any) -> np.ndarray | None:
    """The slot as numpy float32: the very array, views included, if it is that already."""
    return None if slot is None else np.asarray(slot, np.float32)


def _content(sites: Mapping[str, NormalForm]) -> Iterable[Any]:
    """All that determines the function, in an order of its own."""
    for name in sorted(sites):
        form = sites[name]
        yield name
        slots = {"R": form.R, "s": form.s, "b": form.b}
        for k, term in enumerate(form.terms):
            if term.pair is None:
                slots |= {f"A{k}": term.A, f"B{k}": term.B}
            else:
                yield f"pair{k}={term.pair}"
            slots |= {f"d{k}": term.d, f"e{k}": term.e, f"u{k}": term.u}
        for side, all_blocks in (("P", form.P), ("Q", form.Q)):
            for k, blocks in enumerate(all_blocks):
                slots |= {f"{side}{k}": blocks.values, f"{side}{k}order": blocks.order}
        if form.S is not None:
            slots |= {"S": form.S.values, "Srows": form.S.rows, "Scols": form.S.cols}
        for k, product in enumerate(form.K):
            slots |= {f"K{k}left": product.left, f"K{k}right": product.right}
        if form.rows is not None:
            slots |= {"rows": form.rows.rows, "ids": form.rows.ids}
        for slot, array in slots.items():
            if array is not None:
                yield slot
                yield array
