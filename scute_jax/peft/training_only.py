"""LoRA variants that change how LoRA is trained, and nothing of what it computes afterwards.

VeLoRA (arXiv:2405.17991) compresses the activations that the backward pass keeps; its file also
holds lora_velora_embed, the projection of that compression. MonteCLoRA perturbs A in training by
samples of a learned distribution; its file also holds that distribution under
lora_monteclora_sampler. Source: VeloraLinearVariant.forward and MontecloraLinearVariant.forward of
peft/tuners/lora/variants.py, where the training flag guards both. Served is the LoRA of the file.
"""

from collections.abc import Collection

from scute_jax.normal_form import NormalForm
from scute_jax.peft.lora import INERT, lora
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

VELORA = ("num_groups", "scale", "init_type")
MONTECLORA = (
    "num_samples",
    "use_entropy",
    "dirichlet_prior",
    "sample_scaler",
    "kl_loss_weight",
    "buffer_size",
)
SAMPLER = ("std_prior", "expert_weights_prior", "expert_weights", "gaussian_var_prior")


@register("LORA", variant="velora_config", name="VELORA", inert=INERT)
def velora(site: Site) -> NormalForm:
    """x W + c (x A) B"""
    _check_known(site, "velora_config", VELORA)
    site.ignore("lora_velora_embed")
    return lora(site)


@register("LORA", variant="monteclora_config", name="MONTECLORA", inert=INERT)
def monteclora(site: Site) -> NormalForm:
    """x W + c (x A) B"""
    _check_known(site, "monteclora_config", MONTECLORA)
    site.ignore(*(f"lora_monteclora_sampler.{name}" for name in SAMPLER))
    return lora(site)


def _check_known(site: Site, field: str, names: Collection[str]) -> None:
    """Raises AdapterError if the field holds a setting that might change more than training."""
    unknown = [name for name in site.option(field, kind=dict) if name not in names]
    if unknown:
        site.refuse_field(field, f"of unknown meaning is {', '.join(map(repr, unknown))}")
