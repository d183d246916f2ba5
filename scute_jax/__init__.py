"""scute_jax: adapters of every common PEFT method in one batch over one frozen base, exactly."""

from scute_jax.apply import SiteParams, apply_normal_form, site_params
from scute_jax.byte_model import Cost, Machine, byte_cost
from scute_jax.errors import AdapterError
from scute_jax.fold import fold
from scute_jax.native import restore_adapter, save_adapter
from scute_jax.normal_form import Adapter, NormalForm, Term
from scute_jax.peft import load_peft, save_peft
from scute_jax.scale import scaled
from scute_jax.segments import Segments, segments
from scute_jax.stack import stack

__all__ = [
    "Adapter",
    "AdapterError",
    "Cost",
    "Machine",
    "NormalForm",
    "Segments",
    "SiteParams",
    "Term",
    "apply_normal_form",
    "byte_cost",
    "fold",
    "load_peft",
    "restore_adapter",
    "save_adapter",
    "save_peft",
    "scaled",
    "segments",
    "site_params",
    "stack",
]
