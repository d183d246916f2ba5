"""A short soak; `python -m benchmarks.soak` runs the long one."""

import pytest

pytest.importorskip("torch", reason="the adapters are made by the PEFT library, which needs torch")

from benchmarks.soak import Shape, soak  # noqa: E402

# One or two of every kind of slot; the long soak has all methods.
RECIPES = (
    "lora",
    "lora-r33",
    "dora",
    "ia3",
    "ia3-out",
    "vera",
    "oft",
    "ssf",
    "hra",
    "fourierft",
    "alora",
)


def test_every_text_is_that_of_its_request_alone():
    shape = Shape(requests=300, adapters=44, spare=11, layers=1, recipes=RECIPES)
    outcome = soak(shape)
    assert outcome.wrong == [] and outcome.errors == []
    assert outcome.completed > 200 and outcome.completed + outcome.cancelled == 300
    assert outcome.other_than_base > 0.6 * outcome.compared_with_base > 10, "adapters do nothing"
    assert outcome.compilations_after_warm_up == 0 < outcome.compilations_of_warm_up
    assert (outcome.pages_leaked, outcome.slots_leaked) == (0, 0)
    happened = (outcome.cancelled, outcome.replaced, outcome.added, outcome.removed)
    assert min(happened) > 0 and outcome.preemptions > 0 and outcome.loads > shape.resident
