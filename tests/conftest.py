"""Settings and fixtures of every test: strict array promotion, hardware marks, the demo model."""

import os
from pathlib import Path

import hypothesis
import jax
import pytest

from scute_jax.demo_model import DemoModelUnavailable, demo_model_path

# The same examples in every run; `HYPOTHESIS_PROFILE=default make test` draws others.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Many tests build engines of one shape: each of their steps is compiled once for all of them.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_let_go():
    """A process that keeps thousands of compiled programs runs out of memory maps, and dies."""
    yield
    jax.clear_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest file first: one that came last would run beside an idle worker.
    items.sort(key=lambda item: item.path.name != "test_smollm2.py")
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


@pytest.fixture(scope="session")
def smollm2_twin(smollm2_path: Path):
    """SmolLM2-135M-Instruct as transformers loads it from the same file, in float32.

    Shared by all tests, which leave it as it is: loading takes more than ten seconds.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    return model.eval()
