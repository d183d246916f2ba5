"""An adapter as a checkpoint that PEFT loads and runs to the same numbers.

What is written follows from the normal forms, not from where they came from: no slot but b and
terms is a LoRA (one shared pair alone a VeRA), a rotation alone an OFT, a scale of the output or of
the input alone an (IA)3, s and b an SSF, s and terms a DoRA. Any stack that ends in one of these
can be written; another mix of slots has no PEFT method of its own and is refused. Kronecker
products are written as the terms that they are equal to.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from scute_jax.delta import term_factors
from scute_jax.errors import AdapterError
from scute_jax.fold import fold
from scute_jax.kronecker import expanded
from scute_jax.normal_form import Adapter, NormalForm, Term
from scute_jax.peft.alora import FIELD as INVOCATION
from scute_jax.peft.base import EMBEDDING as TOKENS
from scute_jax.peft.base import HEAD
from scute_jax.peft.checkpoint import CONFIG, SAFETENSORS
from scute_jax.peft.dora import MAGNITUDE, column_norms
from scute_jax.peft.names import PREFIX
from scute_jax.peft.oft import nearest_divisor, neumann_coefficients
from scute_jax.peft.oft_inverse import cayley_inverse, neumann_inverse
from scute_jax.peft.weights import as_float32

Forms = Mapping[str, NormalForm]  # module path -> folded form
Tensors = dict[str, np.ndarray]
Written = tuple[dict[str, Any], Tensors]  # fields of the config, tensors


def save_peft(adapter: Adapter, path: str | PathLike, params: Any = None) -> None:
    """Writes adapter_config.json and adapter_model.safetensors into the folder `path`.

    `params` (an object with `linear(site)`, or a mapping of Hugging Face tensor names to arrays) is
    needed for a DoRA that was not loaded from a checkpoint: its magnitudes depend on the base.
    Dtypes: float32. Raises: AdapterError naming the site whose slots no PEFT method has.
    """
    forms = {_module(site): expanded(fold(form)) for site, form in adapter.sites.items()}
    config, tensors = _writer(adapter, forms)(forms, adapter, params)
    if adapter.invocation:
        config = {**config, INVOCATION: list(adapter.invocation)}
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "base_model_name_or_path": _config_of(adapter).get("base_model_name_or_path"),
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "peft_version": "0.18.0",  # the oldest version that reads all of these forms alike
        "target_modules": list(forms),
        **config,
    }
    arrays = {f"{PREFIX}{k}": np.ascontiguousarray(v, np.float32) for k, v in tensors.items()}
    arrays = {k.replace(f"{PREFIX}/", "base_model."): v for k, v in arrays.items()}
    save_file(arrays, folder / SAFETENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _writer(adapter: Adapter, forms: Forms):
    """The function that writes an adapter of these slots."""
    used = {_slots(form) for form in forms.values()}
    _check_sites(forms)
    if adapter.invocation and not all(set(slots) <= set("bpt") for slots in used):
        raise AdapterError("an adapter with an invocation is a LoRA in PEFT; this one is not.")
    if adapter.invocation:
        return _lora
    if adapter.method == "SSF" and used <= {"", "s", "b", "sb"}:
        return _ssf
    if used == {"p"} and len({f.terms[0].pair for f in forms.values()}) == 1:
        return _vera
    if all(set(slots) <= set("bpt") for slots in used):
        return _lora
    if used <= {"R"}:
        return _oft
    if used <= {"v", "s"}:
        return _ia3
    if used <= {"", "s", "b", "sb"}:
        return _ssf
    if {slots.replace("p", "t") for slots in used} <= {"st", "sbt"}:
        return _dora
    odd = Counter(_slots(form) for form in forms.values()).most_common()[-1][0]
    module = next(name for name, form in forms.items() if _slots(form) == odd)
    live = ", ".join(sorted(used))
    raise AdapterError(
        f"{module}: no PEFT method that is written here has the slots of this adapter ({live}; P, "
        "R, Q rotations, v input scale, s, b, t terms, p shared pair, S sparse, T token rows); "
        "save its parts one by one, keep the original, or make a LoRA of it (`scute convert`)."
    )


def _check_sites(forms: Forms) -> None:
    """Raises AdapterError for a site that is no projection and no embedding with terms alone."""
    for module, form in forms.items():
        is_linear = module == HEAD or module.endswith("_proj")
        if not is_linear and not (module == TOKENS and _slots(form) in ("", "p", "t")):
            raise AdapterError(
                f"{module}: what an adapter does here is not written; keep its original "
                "checkpoint, or leave the site out."
            )


def _slots(form: NormalForm) -> str:
    """The parts that a form has, a letter each; what they mean stands in the refusal above."""
    shared = len(form.terms) == 1 and form.terms[0].pair is not None and form.terms[0].u is None
    named = {
        "R": form.R is not None and form.R.shape[-1] > 1,
        "v": form.R is not None and form.R.shape[-1] == 1,
        "s": form.s is not None,
        "b": form.b is not None,
        "p": shared,
        "t": bool(form.terms) and not shared,
        "P": bool(form.P),
        "Q": bool(form.Q),
        "S": form.S is not None,
        "T": form.rows is not None,
    }
    return "".join(name for name, has in named.items() if has)


def _lora(forms: Forms, adapter: Adapter, params: Any) -> Written:
    """Terms side by side as one pair of factors with alpha = r; b as the bias of lora_B."""
    biased = any(form.b is not None for form in forms.values())
    if biased and TOKENS in forms:
        raise AdapterError(
            f"{TOKENS}: PEFT has no lora_bias where a LoRA adapts the embedding, but other sites "
            "of this adapter have a shift; save the two parts one by one."
        )
    tensors: Tensors = {}
    for module, form in forms.items():
        A, B = _factors(form.terms) if form.terms else _zero_factors(module, adapter)
        if module == TOKENS:
            tensors |= {f"{module}.lora_embedding_A": A.T, f"{module}.lora_embedding_B": B.T}
            continue
        tensors |= {f"{module}.lora_A.weight": A.T, f"{module}.lora_B.weight": B.T}
        if biased:
            tensors[f"{module}.lora_B.bias"] = np.zeros(B.shape[1]) if form.b is None else form.b
    return {"peft_type": "LORA", "lora_bias": biased, **_ranks(tensors)}, tensors


def _ranks(tensors: Tensors) -> dict[str, Any]:
    """r and alpha = r, with patterns for the modules of another rank than the most common."""
    down = re.compile(r"\.lora_(embedding_A|A\.weight)$")
    ranks = {down.sub("", name): len(A) for name, A in tensors.items() if down.search(name)}
    r = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {re.escape(module): rank for module, rank in ranks.items() if rank != r}
    return {"r": r, "lora_alpha": r, "rank_pattern": pattern, "alpha_pattern": pattern}


def _factors(terms: tuple[Term, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A [d_in, r] and B [r, d_out] of all terms together, with the vectors of pairs inside."""
    A, B = zip(*map(term_factors, terms), strict=True)
    return np.concatenate(A, axis=1), np.concatenate(B, axis=0)


def _zero_factors(module: str, adapter: Adapter) -> tuple[np.ndarray, np.ndarray]:
    d_in, d_out = _widths(module, adapter)
    return np.zeros((d_in, 1)), np.zeros((1, d_out))


def _widths(module: str, adapter: Adapter) -> tuple[int, int]:
    """(d_in, d_out) of a site as the adapter's metadata has it."""
    for site, d_in, d_out in _stated_widths(adapter.info):
        if _module(site) == module:
            return d_in, d_out
    raise AdapterError(
        f"{module}: the form of this site does not show its widths, and the adapter was not loaded "
        "from a checkpoint that did; leave the site out, or give it a term of zeros."
    )


def _stated_widths(info: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """The widths in the metadata of an adapter, and of those that it was stacked or scaled from."""
    yield from info.get("widths", ())
    parts = info.get("stack", ())
    for metadata in (*parts, *info.get("scaled", (0.0,))[1:]):
        yield from _stated_widths(dict(metadata))


def _vera(forms: Forms, adapter: Adapter, params: Any) -> Written:
    """The pair in its largest widths, which is what PEFT makes for these modules."""
    terms = {module: form.terms[0] for module, form in forms.items()}
    A = max((t.A for t in terms.values()), key=lambda A: A.shape[0])
    B = max((t.B for t in terms.values()), key=lambda B: B.shape[1])
    tensors: Tensors = {"/vera_A": np.asarray(A).T, "/vera_B": np.asarray(B).T}
    for module, term in terms.items():
        r, d_out = term.B.shape
        tensors[f"{module}.vera_lambda_d"] = np.ones(r) if term.d is None else term.d
        tensors[f"{module}.vera_lambda_b"] = np.ones(d_out) if term.e is None else term.e
    return {"peft_type": "VERA", "r": A.shape[1], "save_projection": True}, tensors


def _ia3(forms: Forms, adapter: Adapter, params: Any) -> Written:
    """Scales of the output as columns, scales of the input as rows of feed-forward modules."""
    tensors, feedforward = {}, []
    for module, form in forms.items():
        if form.s is not None:
            tensors[f"{module}.ia3_l"] = np.reshape(form.s, (-1, 1))
        else:
            tensors[f"{module}.ia3_l"] = np.reshape(form.R, (1, -1))
            feedforward.append(module)
    return {"peft_type": "IA3", "feedforward_modules": feedforward}, tensors


def _ssf(forms: Forms, adapter: Adapter, params: Any) -> Written:
    """Scale and shift at every site, ones and zeros where a form has none."""
    tensors = {}
    for module, form in forms.items():
        held = next((v for v in (form.s, form.b) if v is not None), None)
        d_out = len(held) if held is not None else _widths(module, adapter)[1]
        tensors[f"{module}.ssf_scale"] = np.ones(d_out) if form.s is None else form.s
        tensors[f"{module}.ssf_shift"] = np.zeros(d_out) if form.b is None else form.b
    return {"peft_type": "SSF"}, tensors


def _oft(forms: Forms, adapter: Adapter, params: Any) -> Written:
    """Q of every R: by the exact transform if all are orthogonal, else by a Neumann series."""
    blocks = {module: np.asarray(form.R, np.float64) for module, form in forms.items()}
    terms = _config_of(adapter).get("num_cayley_neumann_terms", 5)
    exact = {module: cayley_inverse(R) for module, R in blocks.items()}
    neumann = any(Q is None for Q in exact.values())
    if neumann:
        coefficients = neumann_coefficients(terms)
        exact = {module: neumann_inverse(R, coefficients) for module, R in blocks.items()}
    tensors: Tensors = {}
    for module, Q in exact.items():
        if Q is None:
            raise AdapterError(
                f"{module}: its R is neither orthogonal nor a Neumann series of {terms} terms as "
                "PEFT computes it now, so no OFT checkpoint gives these numbers; keep the original."
            )
        k = Q.shape[-1]
        tensors[f"{module}.oft_R.weight"] = Q[:, *np.triu_indices(k, 1)]
    widths = {(R.shape[0] * R.shape[1], R.shape[1]) for R in blocks.values()}
    fields = {"use_cayley_neumann": neumann, "num_cayley_neumann_terms": terms}
    return {"peft_type": "OFT", **_block_sizes(widths), **fields}, tensors


def _block_sizes(widths: set[tuple[int, int]]) -> dict[str, int]:
    """One r or oft_block_size that gives every (d_in, k) by PEFT's rule of the nearest divisor."""
    for n in range(1, max(d_in for d_in, _ in widths) + 1):
        if all(nearest_divisor(d_in, n) == k for d_in, k in widths):
            return {"r": 0, "oft_block_size": n}
        if all(d_in // nearest_divisor(d_in, n) == k for d_in, k in widths):
            return {"r": n, "oft_block_size": 0}
    raise AdapterError(
        f"no one block size of PEFT gives the blocks of this adapter, {sorted(widths)} as (d_in, "
        "block); keep the original checkpoint."
    )


def _dora(forms: Forms, adapter: Adapter, params: Any) -> Written:
    """B without s, and m = s norm(W + A B)."""
    kept, tensors = adapter.info.get("magnitudes", {}), {}
    _check_unscaled_bias(forms, adapter, params)
    for module, form in forms.items():
        A, B = _factors(form.terms)
        s = np.asarray(form.s, np.float64)
        B = np.divide(B, s, out=np.zeros(B.shape), where=s != 0)
        site = module.removeprefix("model.")
        if site in kept and adapter.method == "DORA":
            m = kept[site]
        else:
            m = s * column_norms(_weight(params, module), (Term(A, B),))
        tensors |= {f"{module}.lora_A.weight": A.T, f"{module}.lora_B.weight": B.T}
        tensors[f"{module}.{MAGNITUDE}"] = m
    return {"peft_type": "LORA", "use_dora": True, **_ranks(tensors)}, tensors


def _check_unscaled_bias(forms: Forms, adapter: Adapter, params: Any) -> None:
    """Raises AdapterError unless every b is bias (1 - s), which is what a DoRA makes of a bias."""
    if adapter.method == "DORA" and _config_of(adapter).get("bias", "none") == "none":
        return
    for module, form in forms.items():
        if form.b is None:
            continue
        bias = None if params is None else _bias(params, module)
        if bias is None or not np.allclose(
            form.b, bias * (1 - np.asarray(form.s)), rtol=1e-5, atol=1e-6
        ):
            raise AdapterError(
                f"{module}: its shift b is not bias (1 - s) of the base's own bias, or params= was "
                "not given to show it; a DoRA checkpoint has no other shift."
            )


def _weight(params: Any, module: str) -> np.ndarray:
    if params is None:
        raise AdapterError(
            f"{module}: the magnitudes of a DoRA depend on the base's weights; pass params=."
        )
    if hasattr(params, "linear"):
        return as_float32(params.linear(module.removeprefix("model.")).weight)
    return as_float32(params[f"{module}.weight"]).T


def _bias(params: Any, module: str) -> np.ndarray | None:
    if hasattr(params, "linear"):
        found = params.linear(module.removeprefix("model.")).bias
    else:
        found = params.get(f"{module}.bias")
    return None if found is None else as_float32(found)


def _module(site: str) -> str:
    return site if site == HEAD else f"model.{site}"


def _config_of(adapter: Adapter) -> dict[str, Any]:
    """What adapter_config.json said, if the adapter was loaded from one."""
    return json.loads(adapter.info.get("config", "{}"))
