"""AdaLoRA:  F(x) = x W + bias + c ((x A) * e) B,   c = alpha / (init_r + 1e-5).

Source: AdaLoRA eq. 3 (arXiv:2303.10512); SVDLinear of peft/tuners/adalora/layer.py. Tensors:
lora_A [r, d_in], lora_B [d_out, r], lora_E [r, 1] = e. A trained file is pruned: rank_pattern
holds for "<module>.lora_E" which of the init_r ranks are left, and the tensors have these only, at
some modules none. The scale still divides by init_r, which is not in the tensors. With an alpha of
0 or less, the scale multiplies by the number of ranks left instead of alpha.
"""

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.names import some
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

INERT = (
    "target_r",  # how ranks were allocated in training
    "tinit",
    "tfinal",
    "deltaT",
    "beta1",
    "beta2",
    "orth_reg_weight",
    "total_step",
    "lora_dropout",
    "fan_in_fan_out",
    "init_lora_weights",
    "r",  # fields of LoRA that AdaLoRA has and ignores
    "use_rslora",
    "alpha_pattern",
    "lora_bias",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
    "eva_config",
    "corda_config",
    "lora_ga_config",
)


@register("ADALORA", inert=INERT)
def adalora(site: Site) -> NormalForm:
    """x W + c ((x A) * e) B"""
    init_r = site.option("init_r", kind=int, required=True)
    alpha = site.option("lora_alpha", kind=float, required=True)
    if init_r < 0:
        site.refuse_field("init_r", "needed 0 or more")
    r = _ranks_left(site, init_r)
    A = site.tensor("lora_A", (r, site.d_in)).T
    B = site.tensor("lora_B", (site.d_out, r)).T
    e = site.tensor("lora_E", (r, 1)).reshape(-1)
    if r == 0:
        return NormalForm()
    return NormalForm(terms=(Term(A, B, c=(alpha if alpha > 0 else r) / (init_r + 1e-5), d=e),))


def _ranks_left(site: Site, init_r: int) -> int:
    masks = site.once("rank_pattern", lambda: _masks(site))
    mask = masks.get(site.module)
    if mask is None:
        return init_r
    if len(mask) != init_r:
        site.refuse_field(
            "rank_pattern", f"{site.module} has {len(mask)} entries, but init_r is {init_r}"
        )
    return sum(mask)


def _masks(site: Site) -> dict[str, list[bool]]:
    """Module -> which of its ranks are left."""
    pattern = site.option("rank_pattern", kind=dict) or {}
    known = {f"{p.module}.lora_E" for p in site.targets}
    if unknown := [name for name in pattern if name not in known]:
        needed = f"needed names like '{site.module}.lora_E', but it has {some(unknown)}"
        site.refuse_field("rank_pattern", needed)
    for name, mask in pattern.items():
        if not isinstance(mask, list) or not all(isinstance(left, bool) for left in mask):
            site.refuse_field("rank_pattern", f"{name} has to be a list of true and false")
    return {name.removesuffix(".lora_E"): mask for name, mask in pattern.items()}
