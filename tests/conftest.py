"""Settings and fixtures of every test: strict array promotion, hardware marks, the demo model."""

from pathlib import Path

import jax
import pytest

from scute_jax.demo_model import DemoModelUnavailable, demo_model_path

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        reason = f"needs an NVIDIA GPU; jax runs on {jax.default_backend()} here"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once and cached."""
    try:
        return demo_model_path()
    except DemoModelUnavailable as error:
        pytest.skip(str(error))
