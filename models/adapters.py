"""What a Llama does to an adapter before it is resident: slots moved to where they cost less."""

from dataclasses import replace

import jax

from scute_jax.fold import fold
from scute_jax.normal_form import Adapter, NormalForm
from scute_jax.stack import stack


def for_llama(adapter: Adapter) -> Adapter:
    """The same function of the whole model, folded, with input vectors of down_proj moved away.

    In a gated MLP the input of down_proj is act(gate(x)) * up(x), so a vector that scales it can
    scale the whole output of up_proj instead: an s, which rides in the expand, in place of an R.
    Not so where down_proj has terms besides, since they read the input unscaled.
    """
    sites = {site: fold(form) for site, form in adapter.sites.items()}
    for site in list(sites):
        form = sites[site]
        scales_input = form.R is not None and form.R.shape[-1] == 1
        if site.endswith(".mlp.down_proj") and scales_input and not form.terms:
            up = site.removesuffix("down_proj") + "up_proj"
            sites[up] = stack(sites.get(up, NormalForm()), NormalForm(s=form.R[:, 0, 0]))
            sites[site] = replace(form, R=None)
    changed = {site: form for site, form in sites.items() if jax.tree.leaves(form)}
    return replace(adapter, sites=changed)
