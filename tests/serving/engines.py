"""A tiny model with adapters of every method, on disk and in an engine."""

from pathlib import Path

import pytest

REASON = "the adapters are made by the PEFT library, which needs torch; it is not installed here"


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Name -> folder of the base ("base") and of each adapter."""
    pytest.importorskip("torch", reason=REASON)
    import tenants

    return tenants.build(tmp_path_factory.mktemp("tenants"))


@pytest.fixture(scope="session")
def engine(folders):
    """An engine with all adapters registered and room for four of them. Tests leave it as it is."""
    return make_engine(folders)


def make_engine(folders, names=None, **options):
    from scute_jax.serving import Engine

    given = {"max_adapters": 4, "dtype": "float32"} | options
    engine = Engine.from_pretrained(folders["base"], **given)
    for name in folders if names is None else names:
        if name != "base":
            engine.add_adapter(name, folders[name])
    return engine
