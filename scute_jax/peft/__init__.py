"""PEFT checkpoints as adapters, and back; a registry of methods that users can add to."""

# The imports of the method modules enter them in the registry.
from scute_jax.peft import dora, ia3, lora, oft, ssf, vera  # noqa: F401, I001
from scute_jax.peft import beft, boft, fourierft, pvera, randlora, training_only  # noqa: F401
from scute_jax.peft import adalora, bdlora, deft, delora, glora, gralora  # noqa: F401
from scute_jax.peft import hra, kasa, loha, lokr, miss, peanut, poly, psoft  # noqa: F401
from scute_jax.peft import road, shira, supertuning, waveft  # noqa: F401
from scute_jax.peft import tinylora, unilora, vblora  # noqa: F401
from scute_jax.peft import alora, ln_tuning, token_rows  # noqa: F401
from scute_jax.peft.load import load_peft
from scute_jax.peft.registry import Method, methods, register
from scute_jax.peft.save import save_peft
from scute_jax.peft.site import Site

__all__ = ["Method", "Site", "load_peft", "methods", "register", "save_peft"]
