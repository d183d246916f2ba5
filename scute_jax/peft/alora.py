"""Activated LoRA:  F(x) = x W + bias + c (x A) B from the last invocation in the prompt on.

Source: aLoRA (arXiv:2504.12397); ALoraLinearVariant of peft/tuners/lora/variants.py. The field
alora_invocation_tokens holds the token ids of the invocation. Tokens before its last occurrence,
and all tokens of a prompt without one, are computed by the base model, and share its keys.
"""

from scute_jax.normal_form import NormalForm
from scute_jax.peft.lora import INERT, lora
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

FIELD = "alora_invocation_tokens"


@register("LORA", variant=FIELD, name="ALORA", inert=INERT, replaces_bias=False)
def alora(site: Site) -> NormalForm:
    """x W + c (x A) B from the last invocation on"""
    form = lora(site)
    if len(form.terms) > 1:
        site.refuse_field("init_lora_weights", "it changes the base for all tokens")
    return form
