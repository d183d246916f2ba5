"""Any adapter as a LoRA, with the error that this makes.

    forms -> [delta_of -> fit -> Term] per site -> Adapter, Report

A LoRA is not what most methods are: at a low rank it is an approximation, and the report says how
far off it is. Shifts of the output are kept, as the bias of lora_B.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scute_jax.delta import Delta, delta_of, norm_before, through_norm
from scute_jax.entries import EMBEDDING
from scute_jax.errors import AdapterError
from scute_jax.identity import content_version
from scute_jax.low_rank import Fit, Moments, fit
from scute_jax.normal_form import Adapter, NormalForm, Term
from scute_jax.peft.base import Base
from scute_jax.peft.weights import BaseWeights

WHY = "what an adapter adds to a projection follows from its weights"


@dataclass(frozen=True)
class SiteReport:
    """What was left out at one site."""

    site: str
    rank: int
    share: float  # |D - A B|^2 / |D|^2
    weighted_share: float | None  # the same of what the site makes of the data's activations
    squared_norm: float  # |D|^2
    shifted: bool  # whether there is a shift, which the bias of lora_B holds exactly


@dataclass(frozen=True)
class Report:
    """What a conversion left out."""

    sites: tuple[SiteReport, ...]

    @property
    def share(self) -> float:
        """The share of the squared norm of all sites together."""
        whole = sum(s.squared_norm for s in self.sites)
        return sum(s.share * s.squared_norm for s in self.sites) / whole if whole else 0.0


def convert_to_lora(
    adapter: Adapter,
    config: Any,
    params: Any,
    rank: int,
    *,
    moments: Callable[[str], Moments | None] | None = None,
    on_site: Callable[[str, Delta, Fit], None] | None = None,
) -> tuple[Adapter, Report]:
    """The LoRA of at most `rank` that is closest to the adapter at each site, and its error.

    `config` and `params` are those of the base, as for `load_peft`. `moments` gives the second
    moments of the input of a site (a matrix, or its diagonal), for which the error is weighted;
    without them it is the plain squared norm. A site with a shift gets one in the result.
    `on_site` is called with each site's delta and factors as they are found.
    Raises: AdapterError naming a site that no LoRA can hold.
    """
    return lora_of(
        deltas_of(adapter, config, params),
        rank,
        method=adapter.method,
        base=json.loads(adapter.info.get("config", "{}")).get("base_model_name_or_path"),
        moments=moments,
        on_site=on_site,
    )


def deltas_of(adapter: Adapter, config: Any, params: Any) -> Iterator[tuple[str, Delta]]:
    """What the adapter adds to the embedding and at each projection, one after the other.

    What it does to a norm is added at the projections that read this norm.
    """
    if adapter.invocation:
        raise AdapterError(
            f"this {adapter.method} adapter acts on the tokens after its invocation only, and a "
            "LoRA on all."
        )
    base = Base.from_config(config)
    known = {*(p.site for p in base.projections), *(m.removeprefix("model.") for m in base.others)}
    if unknown := [site for site in adapter.sites if site not in known]:
        raise AdapterError(f"{unknown[0]}: the base has no such module; is it another model?")
    weights, norms = BaseWeights(params, base), _norms(adapter)
    if EMBEDDING in adapter:
        E = weights.module_weight(f"model.{EMBEDDING}", WHY)
        yield EMBEDDING, _named(EMBEDDING, delta_of, adapter[EMBEDDING], E)
    for p in base.projections:
        norm = norms.get(norm_before(p.site))
        if p.site not in adapter and norm is None:
            continue
        W = weights.weight(p, WHY)
        form = adapter.sites.get(p.site, NormalForm())
        delta = _named(p.site, delta_of, form, W, weights.bias(p, WHY))
        yield p.site, delta if norm is None else through_norm(delta, W, norm.s, norm.b)


def _norms(adapter: Adapter) -> dict[str, NormalForm]:
    """The forms at norms. Raises: AdapterError for one that is more than a scale and a shift."""
    norms = {site: form for site, form in adapter.sites.items() if site.endswith("norm")}
    for site, form in norms.items():
        if form.terms or set(form.live) - set("sb"):
            raise AdapterError(
                f"{site}: it changes a norm by more than a scale and a shift ({form.live}), which "
                "no LoRA of the projections behind it can follow."
            )
    return norms


def _named(site: str, make: Callable[..., Delta], *args: Any) -> Delta:
    try:
        return make(*args)
    except AdapterError as error:
        raise AdapterError(f"{site}: {error}") from None


def lora_of(
    deltas: Iterable[tuple[str, Delta]],
    rank: int,
    *,
    method: str,
    base: str | None = None,
    moments: Callable[[str], Moments | None] | None = None,
    on_site: Callable[[str, Delta, Fit], None] | None = None,
) -> tuple[Adapter, Report]:
    """The same of deltas, which may be made one at a time; `method` says what they come from.

    Raises: AdapterError if all of them are zero.
    """
    if rank < 1:
        raise ValueError(f"the rank of a LoRA is {rank}, needed 1 or more.")
    sites, rows, widths = {}, [], []
    for site, delta in deltas:
        delta = _without_shift(delta) if site == EMBEDDING else delta
        found = fit(delta, rank, None if moments is None else moments(site))
        if on_site is not None:
            on_site(site, delta, found)
        rows.append(_site_report(site, delta, found))
        terms = (Term(found.A, found.B),) if found.A.shape[1] else ()
        shift = None if delta.shift is None else np.float32(delta.shift)
        if terms or shift is not None:
            sites[site] = NormalForm(b=shift, terms=terms)
            widths.append((site, found.A.shape[0], found.B.shape[1]))
    if not sites:
        raise AdapterError(f"this {method} adapter changes nothing, so there is no LoRA of it.")
    lora = Adapter(
        sites=sites,
        method="LORA",
        version=content_version(_content(sites)),
        metadata=(
            ("peft_type", "LORA"),
            ("config", json.dumps({"base_model_name_or_path": base})),
            ("notes", (f"converted from {method} at a rank of at most {rank}",)),
            ("widths", tuple(widths)),
        ),
    )
    return lora, Report(tuple(rows))


def _without_shift(delta: Delta) -> Delta:
    """A shift of every token of an embedding as a term of rank 1: each row of D holds it."""
    if delta.shift is None:
        return delta
    if delta.right is None:
        return Delta(delta.left + delta.shift)
    ones = np.ones((delta.left.shape[0], 1))
    return Delta(np.hstack([delta.left, ones]), np.vstack([delta.right, delta.shift]))


def _site_report(site: str, delta: Delta, found: Fit) -> SiteReport:
    return SiteReport(
        site=site,
        rank=found.A.shape[1],
        share=found.share,
        weighted_share=found.weighted_share,
        squared_norm=found.squared_norm,
        shifted=delta.shift is not None,
    )


def _content(sites: dict[str, NormalForm]) -> Iterator[str | np.ndarray]:
    for site, form in sorted(sites.items()):
        yield site
        arrays = [form.b, *(factor for term in form.terms for factor in (term.A, term.B))]
        yield from (array for array in arrays if array is not None)
