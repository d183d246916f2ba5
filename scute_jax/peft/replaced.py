"""What a config says beyond its method: fields that are refused, biases that are replaced."""

import numpy as np

from scute_jax.errors import AdapterError
from scute_jax.peft.base import EMBEDDING, HEAD, Base
from scute_jax.peft.names import Names, some
from scute_jax.peft.refused import FIELDS
from scute_jax.peft.registry import Method
from scute_jax.peft.site import Reading, Shape


def refuse_fields(reading: Reading, method: Method) -> None:
    """Raises AdapterError for a field that makes the adapter something that is not served."""
    for field, (reason, remedy) in FIELDS.items():
        if field != method.variant and reading.options.get(field):
            tensors = foreign(reading.names, reading.base, reading.tensors.shapes)
            found = f" The file holds {tensors}." if tensors else ""
            reading.options.refuse(
                field,
                f"{reason}, which is not served beside other adapters.{found} {remedy}",
            )


def foreign(names: Names, base: Base, shapes: dict[str, Shape]) -> str:
    """The tensors that belong to no adapted projection: whole modules, token rows, unknown keys."""
    whole = ("weight", "bias", "modules_to_save", "original_module", "token_adapter")
    keys = [
        key
        for module, tensors in names.modules.items()
        for name, key in tensors.items()
        if module in base.others or name.split(".")[0] in whole
    ]
    described = [f"{key!r} {list(shapes[key])}" for key in [*keys, *names.unknown][:3]]
    rows = {
        shapes[key][0]
        for module in (EMBEDDING, HEAD)
        for name, key in names.modules.get(module, {}).items()
        if name.split(".")[-1] == "weight" and name.split(".")[0] in whole and shapes[key]
    }
    described += [f"vocab {n} vs {base.vocab} of the base" for n in rows if n != base.vocab]
    return ", ".join(described)


def bias_shifts(reading: Reading, method: Method) -> dict[str, np.ndarray]:
    """Site -> new bias minus the base's bias, where the config says that biases are replaced.

    Source: _get_learnable_bias_state_dict of peft/tuners/tuners_utils.py: "all" saves every bias of
    the model, "lora_only" and its like those of the adapted modules. Unchanged biases are left out.
    """
    options = reading.options
    value = options.get("bias", "none", kind=str)
    if value == "none":
        return {}
    if not method.replaces_bias or not (value == "all" or value.endswith("_only")):
        options.refuse("bias", 'served are "none", and "all" or "..._only" where PEFT has them')
    adapted, shifts = {p.module for p in reading.targets}, {}
    for projection in reading.base.projections:
        is_adapted = projection.module in adapted
        if not projection.has_bias or not (is_adapted or value == "all"):
            continue
        name = "base_layer.bias" if is_adapted else "bias"
        key = reading.names.modules.get(projection.module, {}).get(name)
        wanted = f"base_model.model.{projection.module}.{name}"
        new = reading.tensor(key, wanted, ((projection.d_out,),), False, False)
        old = reading.weights.bias(projection, f"field 'bias' is {value!r}, so it is replaced")
        if (new != old).any():
            shifts[projection.site] = new - old
    return shifts


def refuse_embedding(reading: Reading) -> None:
    """Raises AdapterError: the token embedding is adapted."""
    keys = list(reading.names.modules.get(EMBEDDING, {}).values())
    raise AdapterError(
        f"{reading.tensors.path}: the token embedding (embed_tokens) is adapted"
        f"{' by ' + some(keys) if keys else ''}, which is served for LoRA and DoRA "
        "only. Train without embed_tokens in target_modules, or merge the adapter into its own "
        "copy of the base."
    )
