"""What adapters cost in one step: bytes that their routes move, launches, and the time of both.

    time = parameters / bandwidth + activations / (bandwidth of where they lie) + launches * launch

No parameter is fitted: the three constants of a machine are measured (`scute_jax.calibrate`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scute_jax.entries import entries, factors_of, pass_of
from scute_jax.fold import fold
from scute_jax.normal_form import SLOTS_AT, NormalForm, slots_beyond

INDEX = 4  # bytes of an index
FLOAT32 = 4  # bytes of a number behind norms and the embedding, and of a logit

Place = Literal["projection", "norm", "embedding"]


@dataclass(frozen=True)
class Machine:
    """Measured constants: bytes a second to memory and to the last cache, seconds of a launch."""

    name: str
    bandwidth: float
    cache_bandwidth: float
    cache_bytes: int
    launch: float


@dataclass(frozen=True)
class Cost:
    """Bytes of the adapters' own arrays, bytes of rows read and written, kernel launches."""

    parameters: int = 0
    activations: int = 0
    launches: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.parameters + other.parameters,
            self.activations + other.activations,
            self.launches + other.launches,
        )

    @property
    def bytes(self) -> int:
        return self.parameters + self.activations

    def seconds(self, machine: Machine) -> float:
        """The time on a machine. Rows lie in the cache where they fit into half of it."""
        in_cache = 2 * self.activations <= machine.cache_bytes
        rows = machine.cache_bandwidth if in_cache else machine.bandwidth
        moved = self.parameters / machine.bandwidth + self.activations / rows
        return moved + self.launches * machine.launch


def byte_cost(
    forms: Sequence[NormalForm],
    rows: Sequence[int],
    d_in: int,
    d_out: int,
    itemsize: int = 2,
    place: Place = "projection",
) -> dict[str, Cost]:
    """Route -> what it costs at one site, d_in -> d_out, in one step.

    `forms` are the adapters in the batch (an empty NormalForm for base rows) and `rows` how many
    rows each has. Routes of a projection: "low rank" (A, B; s and b ride along), "vectors" (s, b
    where nothing else touches those rows), "input transform" (R, P), "output transform" (Q),
    "shared factors", "sparse", "kronecker", and at the head "tokens" (rows). Of a norm (d_in =
    d_out): "norm" (s, b, S). Of the embedding (d_in tokens): "embedding" (A, B, s, b) and "tokens".
    A route that no form has is not there. `itemsize`: bytes of one number.

    Rows before the invocation of an activated LoRA are base rows, and are counted as such.
    Raises: ValueError if counts are missing, or if a form has a slot that the place has not.
    """
    if len(forms) != len(rows):
        raise ValueError(f"{len(forms)} forms, but rows of {len(rows)}; give one count per form.")
    widths = (d_in, d_out, itemsize)
    found = [(fold(form), count) for form, count in zip(forms, rows, strict=True)]
    for k, (form, _) in enumerate(found):
        if place in SLOTS_AT and (odd := slots_beyond(form, place)):
            raise ValueError(f"forms[{k}] has {', '.join(odd)}: no slots of place={place!r}.")
    if place == "norm":
        costs = {"norm": _norm(found, d_out, itemsize)}
    elif place == "embedding":
        costs = {
            "embedding": _embedding(found, d_out, itemsize),
            "tokens": _replaced_rows(found, d_out, itemsize),
        }
    else:
        costs = {
            "low rank": _low_rank(found, *widths),
            "vectors": _vectors(found, *widths),
            "input transform": _turns(found, "in", sum(rows), *widths),
            "output transform": _turns(found, "out", sum(rows), *widths),
            "shared factors": _shared(found, *widths),
            "sparse": _sparse(found, *widths),
            "kronecker": _kronecker(found, *widths),
            "tokens": _replaced_columns(found, sum(rows), *widths),
        }
    return {route: cost for route, cost in costs.items() if cost.bytes}


def fused(costs: Sequence[dict[str, Cost]]) -> Cost:
    """Projections that read the same x (q, k, v or gate, up): their input transforms, factors, own
    or shared, and vectors in the same launches."""
    total = sum((cost for site in costs for cost in site.values()), Cost())
    launches = total.launches
    for routes in (("low rank", "vectors"), ("shared factors",), ("input transform",)):
        own = [site[route].launches for route in routes for site in costs if route in site]
        launches += max(own, default=0) - sum(own)
    return replace(total, launches=launches)


Found = Sequence[tuple[NormalForm, int]]


def _low_rank(found: Found, d_in: int, d_out: int, itemsize: int) -> Cost:
    """Factors and vectors once for each adapter; of its rows x, and h twice."""
    live = [(form, rows) for form, rows in found if form.rank and rows]
    parameters = sum(form.rank * (d_in + d_out) + _ride(form, d_out) for form, _ in live)
    activations = sum(rows * (d_in + 2 * d_out) for _, rows in live)
    return Cost(itemsize * parameters, itemsize * activations, 2 * bool(live))


def _ride(form: NormalForm, d_out: int) -> int:
    return d_out * ((form.s is not None) + (form.b is not None))


def _vectors(found: Found, d_in: int, d_out: int, itemsize: int) -> Cost:
    """s and b of adapters without factors; no launch where others have factors at this site."""
    live = [(form, rows) for form, rows in found if rows and not form.rank and _ride(form, d_out)]
    expand = any(form.rank and rows for form, rows in found)
    parameters = sum(_ride(form, d_out) for form, _ in live)
    activations = sum(2 * rows * d_out for _, rows in live)
    if not live:
        return Cost()
    return Cost(itemsize * parameters, itemsize * activations, 0 if expand else 1)


def _turns(found: Found, side: str, total: int, d_in: int, d_out: int, itemsize: int) -> Cost:
    """A pass over all rows for each kind of rotation, and the blocks of its adapters."""
    passes: dict[str, int] = {}
    for form, rows in found:
        for kind, own in entries(form).items():
            place = pass_of(kind)
            here = "in" if kind == "input" else place and place[0]
            if rows and here == side:
                passes[kind] = passes.get(kind, 0) + own[0]["values"].size
    width = d_in if side == "in" else d_out
    cost = Cost()
    for parameters in passes.values():
        cost += Cost(itemsize * parameters, itemsize * 2 * total * width, 1)
    return cost


def _shared(found: Found, d_in: int, d_out: int, itemsize: int) -> Cost:
    """Each pair once, however many adapters use it; their own vectors; their rows. One launch of
    the three sums up what is split for want of rows."""
    pairs: dict[str | None, int] = {}
    parameters = activations = 0
    for form, rows in found:
        terms = [term for term in form.terms if term.pair is not None]
        if not rows or not terms:
            continue
        pairs |= {term.pair: term.rank for term in terms}
        own = sum(term.rank + d_out + (0 if term.u is None else d_in) for term in terms)
        parameters += own
        activations += rows * (len(terms) * d_in + 2 * d_out)
    parameters += sum(rank * (d_in + d_out) for rank in pairs.values())
    return Cost(itemsize * parameters, itemsize * activations, 3 * bool(pairs))


def _sparse(found: Found, d_in: int, d_out: int, itemsize: int) -> Cost:
    """Values with their row in x, and the start of each column; for its rows a gather from x for
    each value, and h twice."""
    live = [(form.S.values.size, rows) for form, rows in found if form.S is not None and rows]
    parameters = sum(count * (itemsize + INDEX) + (d_out + 1) * INDEX for count, _ in live)
    activations = sum(rows * itemsize * (count + 2 * d_out) for count, rows in live)
    return Cost(parameters, activations, int(bool(live)))


def _kronecker(found: Found, d_in: int, d_out: int, itemsize: int) -> Cost:
    """For each shape: both factors of each adapter; of its rows x, and h twice."""
    shapes: dict[str, Cost] = {}
    for form, rows in found:
        for kind, own in entries(form).items():
            if not rows or factors_of(kind) is None:
                continue
            numbers = sum(entry["left"].size + entry["right"].size for entry in own)
            cost = Cost(itemsize * numbers, itemsize * rows * (d_in + 2 * d_out))
            shapes[kind] = shapes.get(kind, Cost(launches=2)) + cost
    return sum(shapes.values(), Cost())


def _norm(found: Found, d: int, itemsize: int) -> Cost:
    """s, b and S over h in float32. The norm rounds h itself where no adapter waits for it: with
    adapters, h of every row is written and read once more by a pass that rounds."""
    own = _vectors(found, d, d, itemsize) + _sparse(found, d, d, itemsize)
    if not own.bytes:
        return own
    h = _vectors(found, d, d, FLOAT32) + _sparse(found, d, d, FLOAT32)
    total = sum(rows for _, rows in found)
    rounding = Cost(0, 2 * FLOAT32 * total * d, 1) if itemsize < FLOAT32 else Cost()
    return replace(own, activations=h.activations) + rounding


def _embedding(found: Found, d: int, itemsize: int) -> Cost:
    """Of A what its rows look up; B, s and b once for each adapter; of its rows h twice."""
    live = [(form, rows) for form, rows in found if rows and (form.rank or _ride(form, d))]
    parameters = sum(form.rank * (rows + d) + _ride(form, d) for form, rows in live)
    activations = sum(2 * FLOAT32 * rows * d for _, rows in live)
    launches = max((2 if form.rank else 1 for form, _ in live), default=0)
    return Cost(itemsize * parameters, activations, launches)


def _replaced_rows(found: Found, d: int, itemsize: int) -> Cost:
    """The tokens of each adapter once; for its rows one of its own, and h twice."""
    live = [(form.rows.ids.size, rows) for form, rows in found if form.rows is not None and rows]
    parameters = sum(INDEX * tokens + itemsize * rows * d for tokens, rows in live)
    activations = sum(2 * FLOAT32 * rows * d for _, rows in live)
    return Cost(parameters, activations, 2 * bool(live))


def _replaced_columns(found: Found, total: int, d_in: int, d_out: int, itemsize: int) -> Cost:
    """The logits of all adapters' tokens for every row, of which a row takes its own into logits
    that are copied, since they become wider."""
    live = [(form.rows.ids.size, rows) for form, rows in found if form.rows is not None and rows]
    tokens = sum(count for count, _ in live)
    parameters = tokens * (INDEX + itemsize * d_in)
    each = itemsize * d_in + FLOAT32 * (tokens + 2 * d_out)
    taken = sum(2 * FLOAT32 * rows * count for count, rows in live)
    return Cost(parameters, total * each + taken, 3) if live else Cost()
