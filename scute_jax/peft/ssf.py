"""SSF:  F(x) = (x W + bias) * scale + shift.

Source: SSF eq. 2 (arXiv:2210.08823). PEFT has no SSF, so the file form is ours, in PEFT's manner:

    adapter_config.json          {"peft_type": "SSF", "target_modules": [...]}  (target_modules,
                                 exclude_modules, layers_to_transform, layers_pattern as in LoRA)
    adapter_model.safetensors    base_model.model.<module path>.ssf_scale [d_out]
                                 base_model.model.<module path>.ssf_shift [d_out]

Both tensors are there at every adapted module. `save_peft` writes this form.
"""

from scute_jax.normal_form import NormalForm
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site


@register("SSF", live="sb", replaces_bias=False)
def ssf(site: Site) -> NormalForm:
    """(x W + bias) * scale + shift"""
    scale = site.tensor("ssf_scale", (site.d_out,))
    shift = site.tensor("ssf_shift", (site.d_out,))
    return NormalForm(
        s=scale if (scale != 1).any() else None,
        b=shift if shift.any() else None,
    )
