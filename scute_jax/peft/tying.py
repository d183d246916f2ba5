"""What PEFT ties beside the base's own tying of head and embedding.

Trained tokens of the embedding are those of a tied head. With ensure_weight_tying, a LoRA of the
embedding or of the head is one of both (the head gets the factors transposed), and so are
modules_to_save. Without it, each is adapted by itself.
Source: PEFT 0.21, BaseTuner._check_tied_modules of tuners/tuners_utils.py.
"""

import re
from collections.abc import Collection

import numpy as np

from scute_jax.errors import AdapterError
from scute_jax.peft.base import EMBEDDING, HEAD, Base
from scute_jax.peft.options import Options
from scute_jax.peft.site import Reading

NAMES = ("embed_tokens", "lm_head")


def tied_targets(options: Options, base: Base, targets: Collection[str]) -> set[str]:
    """What PEFT adapts besides the targets: the head with the embedding, or both with either."""
    if options.fields["peft_type"] == "TRAINABLE_TOKENS":
        return {HEAD} if base.tied and EMBEDDING in targets else set()
    return {EMBEDDING, HEAD} if _ties_targets(options, base) else set()


def _ties_targets(options: Options, base: Base) -> bool:
    if not _ensured(options, base) or ties_saved(options, base):
        return False
    wanted = options.names("target_modules") or ()
    if isinstance(wanted, str):
        return any(re.fullmatch(wanted, name) for name in NAMES)
    return any(name.split(".")[-1] in NAMES for name in wanted)


def check_tied(reading: Reading) -> None:
    """Raises AdapterError if the factors of a tied LoRA are not the same on both sides.

    Other initialisations give the head factors of its own, and PEFT trains and loads them apart.
    """
    init = reading.options.get("init_lora_weights", True)
    if not _ties_targets(reading.options, reading.base) or init not in (True, False, "gaussian"):
        return
    held = reading.names.modules
    for name, other in (
        ("lora_embedding_A", "lora_B.weight"),
        ("lora_embedding_B", "lora_A.weight"),
    ):
        keys = held.get(EMBEDDING, {}).get(name), held.get(HEAD, {}).get(other)
        if None in keys:
            continue  # refused as missing
        left, right = map(reading.tensors.read, keys)
        if not np.array_equal(left, right.T):
            raise AdapterError(
                f"{reading.tensors.path}: with ensure_weight_tying, tensor {keys[1]!r} has to be "
                f"{keys[0]!r} transposed, but differs; save the adapter again."
            )


def ties_saved(options: Options, base: Base) -> bool:
    """Whether embedding and head are one module of modules_to_save."""
    saved = options.names("modules_to_save") or ()
    return _ensured(options, base) and any(name.split(".")[-1] in NAMES for name in saved)


def _ensured(options: Options, base: Base) -> bool:
    if options.fields.get("peft_type") != "LORA":
        return False
    return options.get("ensure_weight_tying", False, kind=bool) and base.tied
