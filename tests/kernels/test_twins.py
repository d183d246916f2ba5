"""Each Pallas kernel against its definition, interpreted on a CPU and compiled on a GPU.

Shapes are those that a real model has: widths that are no powers of two, ranks of every size,
segments that are empty, short and long.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import normal, random_blocks, random_form, random_term, shared_pairs

import scute_jax as sj
from scute_jax.kernels import (
    at_tiles,
    block_rotate,
    paged_attention,
    scale_input,
    segmented_update,
    shared_factors,
)

# dtype -> share of the largest output: float32 sums in another order; half precision rounds the
# output once (2^-9 and 2^-11) and, inside, the low-rank product once more.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-9}
CASES = {  # d_in, d_out, rows, tile, dtype
    "one row": (24, 10, 1, 1, "float32"),
    "narrow": (24, 10, 45, 16, "float32"),
    "SmolLM2 k_proj": (576, 192, 70, 16, "float32"),
    "bfloat16": (96, 130, 70, 16, "bfloat16"),
    "float16": (96, 130, 70, 16, "float16"),
    "long tiles": (40, 48, 200, 64, "float32"),
    "few rows in a tile": (576, 192, 30, 4, "float32"),
    "few rows in bfloat16": (96, 130, 30, 4, "bfloat16"),
}


def forms_for(rng, d_in, d_out):
    """Adapters of every kind that the segmented update knows, and one that does nothing."""

    def term(r, slots=""):
        return random_term(rng, d_in, d_out, r, slots)

    def form(*args, **kwargs):
        return random_form(rng, d_in, d_out, *args, **kwargs)

    return [
        form(terms=[term(3, "c")]),
        form("sb", terms=[term(33)]),
        form("s"),
        form("b", terms=[term(1), term(16)]),
        form(),
        form(terms=[term(70)]),
    ]


def batch(rng, forms, d_in, d_out, rows, tile, dtype):
    params = sj.site_params(jnp.asarray(normal(rng, d_in, d_out), dtype), forms)
    seg = sj.segments(rng.integers(-1, len(forms), rows), len(forms), tile=tile)
    return params, seg, jnp.asarray(normal(rng, rows, d_in), dtype)


def close(ours, reference, dtype):
    ours, reference = (np.asarray(a, np.float64) for a in (ours, reference))
    bound = TOLERANCE[str(dtype)] * np.abs(reference).max()
    assert np.abs(ours - reference).max() <= bound


@pytest.mark.parametrize("case", CASES)
def test_the_update_of_mixed_adapters(case):
    d_in, d_out, rows, tile, dtype = CASES[case]
    rng = np.random.default_rng(0)
    params, seg, x = batch(rng, forms_for(rng, d_in, d_out), *CASES[case])
    ours = sj.apply_normal_form(params, x, seg, implementation="pallas")
    close(ours, sj.apply_normal_form(params, x, seg, implementation="reference"), dtype)


def test_pools_looked_up_for_other_tiles_are_refused():
    rng = np.random.default_rng(0)
    params, seg, x = batch(rng, forms_for(rng, 24, 10), 24, 10, 40, 16, "float32")
    other = sj.segments([0, 1, 2], 6, tile=16).tiles
    slots = params.slots
    pools = tuple((at_tiles(p, other.slot),) for p in (slots.factors, slots.scale, slots.shift))
    with pytest.raises(ValueError, match=f"looked up for {other.slot.shape[0]} tiles"):
        segmented_update((x[:, :10],), x, *pools, seg.tiles)


@pytest.mark.parametrize("m", [1, 2, 12, 32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_input_transform(m, dtype):
    rng, d_in = np.random.default_rng(1), 96
    forms = [random_form(rng, d_in, 10, block=m) for _ in range(2)] + [random_form(rng, d_in, 10)]
    params, seg, x = batch(rng, forms, d_in, 10, 90, 16, dtype)
    x, slots = seg.sort(x), params.slots
    turn = (scale_input, slots.input_scale) if m == 1 else (block_rotate, slots.rotations[0])
    ours, reference = (
        turn[0]((x,), (turn[1],), seg.tiles, seg.slot, implementation=how)[0]
        for how in ("pallas", "reference")
    )
    close(ours, reference, dtype)
    untouched = np.asarray(seg.slot) % 3 == 2  # the third form, and -1: base rows
    np.testing.assert_array_equal(np.asarray(ours)[untouched], np.asarray(x)[untouched])


@pytest.mark.parametrize("m", [2, 12, 32])
def test_rotations_of_permuted_coordinates(m):
    rng, d = np.random.default_rng(7), 96
    turned = [random_form(rng, d, 10).replace(P=(random_blocks(rng, d, m, 1),)) for _ in range(2)]
    params, seg, x = batch(rng, [*turned, random_form(rng, d, 10)], d, 10, 50, 16, "float32")
    x, (rotation,) = seg.sort(x), params.slots.rotations
    ours, reference = (
        block_rotate((x,), (rotation,), seg.tiles, seg.slot, implementation=how)[0]
        for how in ("pallas", "reference")
    )
    close(ours, reference, "float32")


def test_slices_turn_by_their_own_pools():
    """Three projections in one launch; the second has nothing to turn."""
    rng, d = np.random.default_rng(8), 96
    sites = [batch(rng, [random_form(rng, d, 10, block=32)] * 2, d, 10, 50, 16, "float32")] * 2
    (first, seg, x), (second, _, _) = sites
    second = sj.site_params(second.W, [random_form(rng, d, 10, block=32) for _ in range(2)])
    pools = (first.slots.rotations[0], None, second.slots.rotations[0])
    xs = tuple(seg.sort(x) + i for i in range(3))
    ours, reference = (
        block_rotate(xs, pools, seg.tiles, seg.slot, implementation=how)
        for how in ("pallas", "reference")
    )
    assert ours[1] is xs[1]
    for s in (0, 2):
        close(ours[s], reference[s], "float32")
        assert np.abs(np.asarray(ours[s]) - np.asarray(xs[s])).max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_pairs_of_several_tenants(dtype):
    rng, d_in, d_out = np.random.default_rng(2), 96, 130
    pairs = shared_pairs(d_in, d_out)

    def form(*terms):
        return random_form(rng, d_in, d_out, terms=terms)

    def term(slots, pair):
        return random_term(rng, d_in, d_out, 0, slots, pair)

    forms = [
        form(term("cde", pairs[0])),
        form(term("de", pairs[0]), term("d", pairs[1])),
        form(),
        form(term("de", pairs[1]), random_term(rng, d_in, d_out, 3)),
        form(term("deu", pairs[1]), term("u", pairs[1])),
    ]
    params, seg, x = batch(rng, forms, d_in, d_out, 90, 16, dtype)
    ours, reference = (
        sj.apply_normal_form(params, x, seg, implementation=how) for how in ("pallas", "reference")
    )
    close(ours, reference, dtype)


@pytest.mark.parametrize(
    "n, size, hq, hkv, dh, page, dtype",
    [
        (5, 1, 6, 2, 12, 4, "float32"),  # decoding
        (3, 32, 6, 2, 16, 16, "float32"),  # prefill
        (3, 64, 8, 2, 64, 16, "bfloat16"),
        (4, 1, 9, 3, 64, 16, "bfloat16"),  # SmolLM2
    ],
)
def test_attention_reads_its_own_pages_only(n, size, hq, hkv, dh, page, dtype):
    rng, width = np.random.default_rng(3), 12
    q = jnp.asarray(normal(rng, n, size, hq, dh), dtype)
    k, v = normal(rng, n * width, hkv, page, dh), normal(rng, n * width, hkv, page, dh)
    table = rng.permutation(n * width).reshape(n, width)
    start = rng.integers(0, width * page - size, n)
    rows = np.minimum(size, rng.integers(1, size + 1, n))
    dense = np.full((n, size, hq, dh), np.nan)
    for i in range(n):
        length = start[i] + rows[i]
        keys, values = (p[table[i]].swapaxes(1, 2).reshape(-1, hkv, dh) for p in (k, v))
        for j in range(rows[i]):
            seen = slice(0, start[i] + j + 1)
            for head in range(hq):
                score = keys[seen, head // (hq // hkv)] @ np.float64(q[i, j, head]) / dh**0.5
                share = np.exp(score - score.max())
                dense[i, j, head] = share @ values[seen, head // (hq // hkv)] / share.sum()
        for position in range(length, width * page):  # what nobody wrote may hold anything
            place = table[i, position // page], slice(None), position % page
            k[place], v[place] = np.nan, np.inf
    held = np.arange(size)[None, :] < rows[:, None]
    args = (jnp.asarray(a, jnp.int32) for a in (table, start, rows))
    args = (q, jnp.asarray(k, dtype), jnp.asarray(v, dtype), *args)
    for how in ("pallas", "reference"):
        ours = np.asarray(paged_attention(*args, implementation=how))[held]  # the rest is undefined
        error = np.abs(ours.astype(np.float64) - dense[held]).max()
        assert error <= {"float32": 1e-5, "bfloat16": 0.02}[dtype], how


def test_gradients_are_those_of_the_definition():
    rng, d_in, d_out = np.random.default_rng(4), 24, 10
    pairs = shared_pairs(d_in, d_out)
    forms = forms_for(rng, d_in, d_out)[:4] + [
        random_form(rng, d_in, d_out, "s", block=4),
        random_form(rng, d_in, d_out, block=1),
        random_form(rng, d_in, d_out, terms=[random_term(rng, d_in, d_out, 0, "de", pairs[0])]),
    ]
    params, seg, x = batch(rng, forms, d_in, d_out, 40, 16, "float32")
    weight = normal(rng, 40, d_out)

    def loss(params, x, how):
        return jnp.sum(sj.apply_normal_form(params, x, seg, implementation=how) * weight)

    ours, reference = (
        jax.grad(loss, argnums=(0, 1), allow_int=True)(params, x, how)
        for how in ("pallas", "reference")
    )
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(reference), strict=True
    ):
        if a.dtype == jnp.float32:
            assert np.abs(np.asarray(b)).max() > 0, path
            close(a, b, "float32")


def test_numbers_that_are_none_stay_where_they_are():
    rng, d_in, d_out = np.random.default_rng(5), 24, 10
    forms = forms_for(rng, d_in, d_out)
    bad = jax.tree.map(lambda a: a * np.float32(np.nan), forms[1])
    params, seg, x = batch(rng, [*forms, bad], d_in, d_out, 60, 16, "float32")
    slot = np.asarray(seg.slot)[np.argsort(np.asarray(seg.order))]
    ours = np.asarray(sj.apply_normal_form(params, x, seg, implementation="pallas"))
    assert np.isnan(ours[slot == len(forms)]).all() and np.isfinite(ours[slot < len(forms)]).all()


def test_a_row_has_the_same_bits_beside_any_other_rows():
    rng, d_in, d_out = np.random.default_rng(6), 24, 10
    forms = forms_for(rng, d_in, d_out)
    params, _, x = batch(rng, forms, d_in, d_out, 60, 16, "float32")

    @jax.jit
    def run(x, ids):
        seg = sj.segments(ids, len(forms), tile=16)
        return sj.apply_normal_form(params, x, seg, implementation="pallas")

    ids = rng.integers(-1, len(forms), 60)
    first = np.asarray(run(x, ids))
    for row in (0, 17, 59):
        others, other_x = rng.integers(-1, len(forms), 60), normal(rng, 60, d_in)
        place = 59 - row
        others[place], other_x[place] = ids[row], x[row]
        np.testing.assert_array_equal(np.asarray(run(other_x, others))[place], first[row])


def test_small_input_vectors_keep_their_digits_in_half_precision():
    rng, d_in, d_out = np.random.default_rng(9), 96, 130
    pair = shared_pairs(d_in, d_out)[0]
    term = random_term(rng, d_in, d_out, 0, "de", pair)
    term = term.replace(u=0.01 * normal(rng, d_in))
    forms = [random_form(rng, d_in, d_out, terms=[term]), random_form(rng, d_in, d_out)]
    params, seg, x = batch(rng, forms, d_in, d_out, 40, 16, "bfloat16")
    x = seg.sort(x)
    exact = (np.float64(x) * np.float64(term.u)) @ np.float64(term.A)
    exact = (exact * np.float64(term.d)) @ np.float64(term.B) * np.float64(term.e)
    exact[np.asarray(seg.slot) != 0] = 0
    none = jnp.zeros((40, d_out), jnp.float32)
    for how in ("pallas", "reference"):
        pools = (params.slots.shared,)
        (ours,) = shared_factors((none,), x, pools, seg.slot, implementation=how)
        assert np.abs(np.asarray(ours) - exact).max() <= 0.02 * np.abs(exact).max()
