"""(IA)3:  F(x) = (x W + bias) * l, or with feed-forward modules F(x) = (x * l) W + bias.

Source: (IA)3 (arXiv:2205.05638). Tensor: ia3_l, of shape [d_out, 1] where the output is scaled and
[1, d_in] where the input is. The first is s = l; the second is R with blocks of size 1.
"""

from scute_jax.normal_form import NormalForm
from scute_jax.peft.names import some
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

DEFAULT_FEEDFORWARD = ("down_proj",)  # PEFT's own, for every served model_type


@register("IA3", live="Rs", inert=("fan_in_fan_out", "init_ia3_weights"), replaces_bias=False)
def ia3(site: Site) -> NormalForm:
    """(x W + bias) * l, or (x * l) W + bias"""
    is_feedforward = _is_feedforward(site)
    scaled, wanted = ("input", (1, site.d_in)) if is_feedforward else ("output", (site.d_out, 1))
    had = site.shape("ia3_l")
    if had is not None and had != wanted and had in ((1, site.d_in), (site.d_out, 1)):
        site.refuse(
            f"ia3_l has shape {list(had)}, but by feedforward_modules "
            f"({site.names('feedforward_modules')!r}) its {scaled} is scaled, which needs "
            f"{list(wanted)}; correct feedforward_modules in adapter_config.json."
        )
    scale = site.tensor("ia3_l", wanted).reshape(-1)
    return NormalForm(R=scale.reshape(-1, 1, 1)) if is_feedforward else NormalForm(s=scale)


def _is_feedforward(site: Site) -> bool:
    """Whether the config lists the module as feed-forward: PEFT matches bare ends of the path.

    Source: _check_target_module_feedforward of peft/tuners/ia3/model.py.
    """
    names, targets = site.names("feedforward_modules"), site.names("target_modules")
    if isinstance(names, str):
        return site.is_named("feedforward_modules", names)
    if isinstance(names, tuple) and isinstance(targets, tuple) and not set(names) <= set(targets):
        site.refuse_field(
            "feedforward_modules",
            f"it has to be a part of target_modules ({some(targets)}), as PEFT demands; name the "
            "feed-forward modules there as they are named in target_modules",
        )
    ends = DEFAULT_FEEDFORWARD if names is None else names
    return any(site.module.endswith(end) for end in ends)
