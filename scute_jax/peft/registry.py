"""The methods that are served: peft_type -> a function from one site's tensors to its normal form.

    @register("MINE")
    def mine(site):
        '''x W + b + (x A) B.'''
        r = site.option("r", kind=int, required=True)
        A = site.tensor("mine_A.weight", (r, site.d_in)).T
        B = site.tensor("mine_B.weight", (site.d_out, r)).T
        return NormalForm(terms=(Term(A, B),))

From then on `load_peft` serves checkpoints of this peft_type. The built-in methods use nothing
else. `site` is a `scute_jax.peft.site.Site`; everything of the checkpoint that the function does
not ask it for is refused by name.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from scute_jax.errors import AdapterError
from scute_jax.normal_form import NormalForm
from scute_jax.peft.options import Options
from scute_jax.peft.refused import TYPES
from scute_jax.peft.site import Site

Form = Callable[[Site], NormalForm]


@dataclass(frozen=True)
class Method:
    """One entry of the registry."""

    peft_type: str  # as in adapter_config.json
    name: str  # as in Adapter.method
    form: Form  # its docstring opens with the equation
    variant: str | None = None  # the field that, when set, chooses this entry of its peft_type
    live: str = ""  # the slots that stay live after folding, of "R", "s", "b", "d", "e"
    inert: frozenset[str] = frozenset()  # fields that do not change the function
    replaces_bias: bool = (
        True  # whether the field `bias` may say that the base's biases are replaced
    )
    also: frozenset[str] = frozenset()  # what it adapts besides projections: "embedding", "norms"

    @property
    def equation(self) -> str:
        return (self.form.__doc__ or "").strip().partition("\n")[0]


_METHODS: dict[tuple[str, str | None], Method] = {}


def register(
    peft_type: str,
    *,
    name: str | None = None,
    variant: str | None = None,
    live: str = "",
    inert: Collection[str] = (),
    replaces_bias: bool = True,
    also: Collection[str] = (),
) -> Callable[[Form], Form]:
    """A decorator that enters a function Site -> NormalForm under a peft_type.

    `variant` names a field of the config that chooses this function when it is set ("use_dora");
    `inert` names fields that change nothing. `replaces_bias` lets the field `bias` of the config
    ("all", "..._only") replace biases of the base, which then are added unscaled. The function is
    called once per adapted site, in the order of the base's modules; `also` names what may be one
    besides projections: "embedding" (embed_tokens, whose d_in is the vocabulary), "norms".
    Raises: ValueError if another function holds the place; a redefined one takes its own again.
    """

    def enter(form: Form) -> Form:
        key, label = (peft_type, variant), f"{peft_type}{f' with {variant}' if variant else ''}"
        held = _METHODS.get(key)
        if held is not None and _identity(held.form) != _identity(form):
            raise ValueError(
                f"{label} is already registered by {'.'.join(_identity(held.form))}; "
                "choose another peft_type."
            )
        _METHODS[key] = Method(
            peft_type,
            name or peft_type,
            form,
            variant,
            live,
            frozenset(inert),
            replaces_bias,
            frozenset(also),
        )
        return form

    return enter


def methods() -> tuple[Method, ...]:
    """All registered methods, in the order of registration."""
    return tuple(_METHODS.values())


def method_of(options: Options) -> Method:
    """The method of a config: the variant whose field is set, else the plain entry of the type.

    Raises: AdapterError if the type is not registered or two variants are set.
    """
    peft_type = options.get("peft_type")
    if not any(known == peft_type for known, _ in _METHODS):
        if peft_type in TYPES:
            options.refuse("peft_type", TYPES[peft_type])
        names = ", ".join(dict.fromkeys(known for known, _ in _METHODS))
        options.refuse("peft_type", f"served are {names} (scute_jax.peft.register adds methods)")
    variants = [v for known, v in _METHODS if known == peft_type and v and options.get(v)]
    if len(variants) > 1:
        options.refuse(variants[0], f"{variants[1]!r} is set as well, and no adapter is both")
    chosen = _METHODS.get((peft_type, variants[0] if variants else None))
    if chosen is None:
        known = [v for t, v in _METHODS if t == peft_type]
        raise AdapterError(
            f"{options.path}: of {peft_type} only the variants with {', '.join(map(str, known))} "
            "are served, and none of these fields is set."
        )
    return chosen


def _identity(form: Form) -> tuple[str, str]:
    return form.__module__, form.__qualname__
