"""Which modules an adapter_config.json says are adapted: PEFT's own rule, on the base's modules.

Source: `check_target_module_exists` and `_maybe_include_all_linear_layers` of
peft/tuners/tuners_utils.py, PEFT 0.21. A list names modules by their path or the end of it; a
string is a regular expression for the whole path; "all-linear" is every projection but the head.
"""

import re
from collections.abc import Iterable

from scute_jax.peft.base import EMBEDDING, HEAD, Base
from scute_jax.peft.options import Options

# What PEFT targets where target_modules is null, by model type; other methods have to state it.
ATTENTION = {kind: ("q_proj", "v_proj") for kind in ("llama", "mistral", "qwen2")}
LIKE_LORA = """
    LORA VERA OFT LOHA LOKR GRALORA DELORA MISS UNILORA TINYLORA HRA DEFT PEANUT PSOFT POLY GLORA
    BOFT PVERA FOURIERFT RANDLORA ROAD SHIRA SUPERTUNING WAVEFT
""".split()
DEFAULT_TARGETS = {
    **dict.fromkeys(LIKE_LORA, ATTENTION),
    "ADALORA": {kind: ("q_proj", "v_proj") for kind in ("llama", "qwen2")},
    "VBLORA": {kind: ("q_proj", "v_proj") for kind in ("llama", "qwen2")},
    "BEFT": {kind: ("v_proj",) for kind in ("llama", "mistral", "qwen2")},
    "IA3": {
        "llama": ("k_proj", "v_proj", "down_proj"),
        "mistral": ("k_proj", "v_proj", "down_proj"),
        "qwen2": ("q_proj", "v_proj", "down_proj"),
    },
}

# Of methods that adapt no projections. qwen2: the table of PEFT has one norm only.
OTHER_TARGETS = {
    "LN_TUNING": {
        "llama": ("input_layernorm", "post_attention_layernorm", "norm"),
        "mistral": ("input_layernorm", "post_attention_layernorm", "norm"),
        "qwen2": ("post_attention_layernorm",),
    },
    "TRAINABLE_TOKENS": dict.fromkeys(ATTENTION, (EMBEDDING,)),
}

Names = str | tuple[str, ...]


def targeted(options: Options, base: Base, norms: bool = False) -> tuple[str, ...]:
    """The paths of the adapted projections, and of the token embedding if it is one of them.

    In the order of the modules of the base; the `norms`, if the method adapts them, come last.
    Raises: AdapterError if a field is malformed, if two
    contradict each other, or if nothing of the base is targeted.
    """
    wanted = options.names("target_modules")
    if wanted is None:
        defaults = DEFAULT_TARGETS | OTHER_TARGETS
        wanted = defaults.get(options.fields["peft_type"], {}).get(base.model_type)
    if wanted is None:
        options.refuse("target_modules", "which modules are adapted depends on it; state it")
    excluded = options.names("exclude_modules")
    layers = _layers(options)
    patterns = options.names("layers_pattern")
    if isinstance(wanted, str) and (layers is not None or patterns is not None):
        field = "layers_pattern" if layers is None else "layers_to_transform"
        options.refuse(field, f"it does not apply to the pattern target_modules={wanted!r}")
    if patterns and layers is None:
        options.refuse("layers_pattern", "it needs layers_to_transform beside it")
    if isinstance(wanted, str) and wanted.lower() == "all-linear":
        wanted = tuple(p.module for p in base.projections if p.module != HEAD)
    modules = (EMBEDDING, *(p.module for p in base.projections))
    modules += tuple(p.module for p in base.norms) if norms else ()
    saved = _saved(options)
    chosen = tuple(
        module
        for module in modules
        if not (excluded and matches(options, "exclude_modules", excluded, module))
        and not any(match(options, "modules_to_save", re.match, s, module) for s in saved)
        and _is_target(options, wanted, layers, patterns, module)
    )
    if not chosen:
        options.refuse(
            "target_modules",
            f"it names no module of this base, whose modules are {', '.join(modules[1:4])}, ..., "
            f"{HEAD}; was the adapter made for another model?",
        )
    return chosen


def matches(options: Options, field: str, names: Names, module: str) -> bool:
    """Whether a string (a pattern of the whole path) or a list (ends of paths) names the module."""
    if isinstance(names, str):
        return bool(match(options, field, re.fullmatch, names, module))
    return any(module == name or module.endswith(f".{name}") for name in names)


def match(options: Options, field: str, how, pattern: str, module: str) -> re.Match | None:
    """`how(pattern, module)`. Raises: AdapterError naming the field if it is no pattern."""
    try:
        return how(pattern, module)
    except (re.error, RecursionError, OverflowError) as error:
        options.refuse(field, f"{pattern!r} is not a regular expression ({error})")


def _is_target(options: Options, wanted: Names, layers, patterns, module: str) -> bool:
    if not matches(options, "target_modules", wanted, module):
        return False
    # PEFT looks at the layer only where a list names the end of a path, not the whole of it.
    if isinstance(wanted, str) or module in wanted or not layers:
        return True
    if not patterns:
        found = re.match(r".*?\.[^.]*\.(?P<idx>\d+)\.", module)
    else:
        tried = (
            match(options, "layers_pattern", re.match, rf"(?:^|.*?\.){p}\.(?P<idx>\d+)\.", module)
            for p in ((patterns,) if isinstance(patterns, str) else patterns)
        )
        found = next((m for m in tried if m is not None), None)
    return found is not None and int(found["idx"]) in layers


def _saved(options: Options) -> list[str]:
    """Patterns of the modules that modules_to_save takes out of the targets."""
    names = options.names("modules_to_save") or ()
    if isinstance(names, str):
        options.refuse("modules_to_save", "needed a list of strings")
    return [rf"(^|.*\.){name}($|\..*)" for name in names]


def _layers(options: Options) -> Iterable[int] | None:
    layers = options.get("layers_to_transform")
    if layers is None or (type(layers) is int and layers >= 0):
        return layers if layers is None else (layers,)
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        options.refuse("layers_to_transform", "needed a layer index or a list of them")
    return tuple(layers)
