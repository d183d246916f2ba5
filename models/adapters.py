"""What a Llama does to an adapter before it is resident: slots moved to where they cost less."""

from dataclasses import replace

import jax

from scute_jax.entries import EMBEDDING
from scute_jax.errors import AdapterError
from scute_jax.fold import fold
from scute_jax.normal_form import SLOTS_AT, Adapter, NormalForm, slots_beyond
from scute_jax.stack import stack

PLACES = ("norm/", f"{EMBEDDING}/", "lm_head/")  # sites with routes of their own


def for_llama(adapter: Adapter) -> Adapter:
    """The same function of the whole model, folded, with input vectors of down_proj moved away.

    In a gated MLP the input of down_proj is act(gate(x)) * up(x), so a vector that scales it can
    scale the whole output of up_proj instead: an s, which rides in the expand, in place of an R.
    Not so where other slots of down_proj read the input unscaled (terms, S, K) or turn it first
    (P), nor where up_proj has a K, which s would expand to a term.
    """
    sites = {site: fold(form) for site, form in adapter.sites.items()}
    for site in list(sites):
        if not site.endswith(".mlp.down_proj"):
            continue
        form, up = sites[site], site.removesuffix("down_proj") + "up_proj"
        above = sites.get(up, NormalForm())
        scales_input = form.R is not None and form.R.shape[-1] == 1
        alone = not form.terms and set(form.live) <= {"R", "Q", "s", "b"}
        if scales_input and alone and not above.K:
            sites[up] = stack(above, NormalForm(s=form.R[:, 0, 0]))
            sites[site] = replace(form, R=None)
    changed = {site: form for site, form in sites.items() if jax.tree.leaves(form)}
    for site, form in changed.items():
        _check_slots(site, form)
    return replace(adapter, sites=changed)


def vocabulary(adapter: Adapter | None, base: int) -> int:
    """How many tokens a tenant has: those of the base, and those that its adapter adds."""
    rows = None if adapter is None else adapter.sites.get(EMBEDDING, NormalForm()).rows
    return base if rows is None or not len(rows.ids) else max(base, int(rows.ids.max()) + 1)


def invoked_at(adapter: Adapter | None, prompt: tuple[int, ...]) -> int | None:
    """The position in a prompt from which an adapter acts; None if it is not invoked at all."""
    invocation = () if adapter is None else adapter.invocation
    starts = range(len(prompt) - len(invocation), -1, -1) if invocation else [0]
    own = (i for i in starts if prompt[i : i + len(invocation)] == invocation)
    return next(own, None)


def route(site: str, kind: str) -> str:
    """The name of a kind of entry at a site: a route that a compiled step has or has not.

    The projections of the layers share theirs; norms, embedding and head have their own, so that a
    batch pays for them only where they are adapted.
    """
    return f"{_place(site)}{kind}"


def kinds_at(site: str, routes: frozenset[str]) -> frozenset[str]:
    """The kinds of entry at a site that some routes have."""
    place = _place(site)
    own = (name.removeprefix(place) for name in routes if name.startswith(place))
    return frozenset(kind for kind in own if place or not kind.startswith(PLACES))


def _place(site: str) -> str:
    return PLACES[0] if is_norm(site) else f"{site}/" if f"{site}/" in PLACES else ""


def is_norm(site: str) -> bool:
    return site == "norm" or site.endswith("layernorm")


def _check_slots(site: str, form: NormalForm) -> None:
    """Raises AdapterError for a slot that the forward pass does not compute at this site."""
    if is_norm(site) or site == EMBEDDING:
        place = "norm" if is_norm(site) else "embedding"
        if odd := slots_beyond(form, place):
            raise AdapterError(
                f"{site}: its form has {', '.join(odd)}, but served here are "
                f"{', '.join(sorted(SLOTS_AT[place]))}."
            )
    elif form.rows is not None and site != "lm_head":
        raise AdapterError(f"{site}: rows replace tokens, and only {EMBEDDING} and lm_head have.")
