"""The counts that programs of a launch share: zeros for each launch, and enough of them."""

import numpy as np

from scute_jax.kernels.arrivals import COUNTS, MOST_ARRAYS, enough, zero_counts


def test_every_launch_gets_zeros_of_its_own():
    made = zero_counts(MOST_ARRAYS + 2)
    assert len(made) == MOST_ARRAYS + 2
    assert all(counts.shape == (COUNTS,) and not np.asarray(counts).any() for counts in made)


def test_counts_that_are_not_enough_are_made_anew():
    (counts,) = zero_counts(1)
    assert enough(counts, COUNTS) is counts
    for given in (counts, None):
        made = enough(given, COUNTS + 1)
        assert made.shape == (COUNTS + 1,) and not np.asarray(made).any()
