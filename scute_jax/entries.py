"""What one adapter puts into the pools of a site: kind of entry -> its arrays.

The kinds are also the routes that a compiled step has or has not: "factors", "scale", "shift",
"input" (the vector of an R of 1x1 blocks), "shared", "sparse", "tokens", the shape of a
Kronecker product ("kron:<a_in>:<b_in>:<a_out>:<b_out>"), and a pass of rotations for each place in
the product, block size and order of coordinates ("in0:32:", "out0:2:<key>").
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

from scute_jax.namespace import namespace
from scute_jax.normal_form import Blocks, NormalForm, Term

EMBEDDING = "embed_tokens"  # the site whose input is a token
Entry = Mapping[str, Array]  # part -> array
PADDING = {"rows": 0, "values": 0, "ids": -1}


def entries(form: NormalForm) -> dict[str, list[Entry]]:
    """The entries of a folded form by kind; offsets from the identity where the pools hold them."""
    found: dict[str, list[Entry]] = {}
    owned = [term for term in form.terms if term.pair is None and term.rank]
    if owned:
        A, B = owned[0].A.T, owned[0].B
        if len(owned) > 1:
            xp = namespace(*(factor for term in owned for factor in (term.A, term.B)))
            A, B = xp.concatenate([t.A.T for t in owned]), xp.concatenate([t.B for t in owned])
        found["factors"] = [{"A": A, "B": B}]
    if form.s is not None:
        found["scale"] = [{"values": form.s - 1}]
    if form.b is not None:
        found["shift"] = [{"values": form.b}]
    if form.R is not None and form.R.shape[-1] == 1:
        found["input"] = [{"values": form.R[:, 0, 0] - 1}]
    for kind, blocks in turns(form):
        eye = np.eye(blocks.values.shape[-1], dtype=blocks.values.dtype)
        found[kind] = [{"values": blocks.values - eye[None]}]
    shared = [term for term in form.terms if term.pair is not None]
    if shared:
        found["shared"] = [_vectors(term) for term in shared]
    if form.S is not None:
        found["sparse"] = [{"rows": form.S.rows, "cols": form.S.cols, "values": form.S.values}]
    for product in form.K:
        (a_in, a_out), (b_in, b_out) = product.left.shape, product.right.shape
        own = found.setdefault(f"kron:{a_in}:{b_in}:{a_out}:{b_out}", [])
        own.append({"left": product.left, "right": product.right})
    if form.rows is not None:
        found["tokens"] = [{"ids": form.rows.ids, "rows": form.rows.rows}]
    return found


def turns(form: NormalForm) -> list[tuple[str, Blocks]]:
    """The rotations of a form with the kind of their pass, in the order in which they act."""
    inputs = list(form.P)
    if form.R is not None and form.R.shape[-1] > 1:
        inputs.append(Blocks(form.R))
    sides = (("in", inputs), ("out", list(form.Q)))
    return [
        (f"{side}{stage}:{blocks.values.shape[-1]}:{blocks.key or ''}", blocks)
        for side, all_blocks in sides
        for stage, blocks in enumerate(all_blocks)
    ]


def pass_of(kind: str) -> tuple[str, int, int, str] | None:
    """(side, stage, block size, key of the order) of a pass of rotations; None for other kinds."""
    head, *rest = kind.split(":")
    if not rest or head == "kron":
        return None
    side = "out" if head.startswith("out") else "in"
    return side, int(head.removeprefix(side)), int(rest[0]), rest[1]


def factors_of(kind: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The shapes of left and right of a kind of Kronecker product; None for other kinds."""
    head, *widths = kind.split(":")
    if head != "kron":
        return None
    a_in, b_in, a_out, b_out = map(int, widths)
    return (a_in, a_out), (b_in, b_out)


def kinds(form: NormalForm) -> frozenset[str]:
    """The kinds of entry that a folded form has: the routes that it needs."""
    return frozenset(entries(form))


def _vectors(term: Term) -> Entry:
    """d and e of a folded term on a shared pair, ones where the term has none, and u."""
    d = np.ones((term.rank,), np.float32) if term.d is None else term.d
    e = np.ones((term.B.shape[1],), np.float32) if term.e is None else term.e
    vectors: dict[str, Any] = {"d": d, "e": e}
    return vectors if term.u is None else vectors | {"u": term.u}


def size_of(kind: str, entry_list: list[Entry], page: int) -> int:
    """What an adapter takes of a kind of different sizes: pages, terms, products, numbers, tokens.

    The pools of a bank have room for the largest.
    """
    if kind == "factors":
        return -(-entry_list[0]["A"].shape[0] // page)
    if kind == "shared" or factors_of(kind) is not None:
        return len(entry_list)
    if kind in ("sparse", "tokens"):
        part: Any = entry_list[0]["cols" if kind == "sparse" else "ids"]
        return part.shape[0]
    return 1
