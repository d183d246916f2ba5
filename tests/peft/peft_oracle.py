"""The PEFT library as the oracle: it makes the checkpoints and says what they compute.

    folder = save_adapter(LoraConfig(...), "biased", tmp_path)    # random, amplified, as PEFT saves
    compare(load_peft(folder, CONFIGS["biased"], random_params("biased")), folder, "biased")
    adapter = serve(LoraConfig(...), "biased")                    # both in one

`compare` measures, at every projection of the base, the distance between the float64 value of our
normal form and the output of PEFT's own layer in float32, as a share of the adapter's own effect.
Skips the importing test module where torch or PEFT is not installed.
"""

import copy
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

REASON = "the oracle is the PEFT library, which needs torch; it is not installed here"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("peft.tuners", reason=REASON)  # a bare `peft` could be this very folder
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)  # everything here is tiny: threads only wait for each other

import peft  # noqa: E402
from forms import apply_over  # noqa: E402
from tiny_checkpoints import CONFIGS, base_output, projections, random_params  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config  # noqa: E402

from scute_jax import Adapter, NormalForm  # noqa: E402
from scute_jax.peft import load_peft  # noqa: E402

ROWS = 5  # rows of x at every site
TOLERANCE = 1e-5  # of the adapter's effect; float32 of PEFT itself leaves about 1e-6


@cache
def _model(name: str) -> PreTrainedModel:
    config = {k: v for k, v in CONFIGS[name].items() if k != "model_type"}
    kind = Qwen2Config if CONFIGS[name]["model_type"] == "qwen2" else LlamaConfig
    model = AutoModelForCausalLM.from_config(kind(**config), dtype=torch.float32)
    state = {k: torch.tensor(v) for k, v in random_params(name).items()}
    model.load_state_dict(state)
    return model.eval()


def base_model(name: str) -> PreTrainedModel:
    """A fresh copy of the tiny base with the weights of `random_params(name)`."""
    return copy.deepcopy(_model(name))


def save_adapter(
    config: peft.PeftConfig, name: str, folder: Path, seed: int = 0, scale: float = 0.3, **save
) -> Path:
    """A checkpoint as PEFT writes it, every trainable number moved by `scale` times a normal one.

    Trained vectors lie near the identity, where a slot that is dropped hardly shows; these do not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)  # of PEFT's own initialisation
        model = peft.get_peft_model(base_model(name), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(scale * noise.to(parameter.dtype))
        model.save_pretrained(folder, **save)
    return folder


def serve(
    config: peft.PeftConfig,
    name: str,
    seed: int = 0,
    scale: float = 0.3,
    tolerance: float = TOLERANCE,
    needs_effect: bool = True,
    **save,
) -> Adapter:
    """The adapter that we load of what PEFT saved, after `compare`."""
    with TemporaryDirectory() as folder:
        path = save_adapter(config, name, Path(folder), seed, scale, **save)
        adapter = load_peft(path, CONFIGS[name], random_params(name))
        compare(adapter, path, name, tolerance, needs_effect)
    return adapter


def quiet(make: Callable[..., peft.PeftConfig], **fields: Any) -> peft.PeftConfig:
    """A configuration of PEFT without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(**fields)


def load_with_peft(folder: Path, name: str) -> peft.PeftModel:
    """The checkpoint on a fresh base, as PEFT loads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(base_model(name), str(folder)).eval()


def compare(
    adapter: Adapter,
    folder: Path,
    name: str,
    tolerance: float = TOLERANCE,
    needs_effect: bool = True,
    prepare: Callable[[peft.PeftModel], Any] | None = None,
) -> None:
    """Asserts that the adapter computes at every projection what PEFT computes with the folder.

    Without `needs_effect`, an adapter that changes nothing at any site passes, too. `prepare` does
    what the PEFT model needs before its layers are called.
    """
    rng, touched, model = np.random.default_rng(11), 0, load_with_peft(folder, name)
    if prepare is not None:
        prepare(model)
    for p in projections(name):
        x = rng.normal(size=(ROWS, p.d_in)).astype(np.float32)
        base_y = base_output(random_params(name), p.module)
        plain = base_y(np.float64(x))
        ours = apply_over(adapter.sites.get(p.site, NormalForm()), base_y, np.float64(x))
        theirs = layer_output(model, p.module, x)
        effect = np.linalg.norm(theirs - plain)
        error = np.linalg.norm(ours - theirs)
        touched += effect > 1e-3 * np.linalg.norm(plain)
        bound = tolerance * effect + 1e-6 * np.linalg.norm(plain)
        assert error <= bound, f"{p.site}: error {error:.2e} of an effect of {effect:.2e}"
    assert touched or not needs_effect, "the adapter has no effect, so nothing was compared"


def layer_output(model: peft.PeftModel, module: str, x: np.ndarray) -> np.ndarray:
    """What PEFT's layer makes of x, float64 of its float32."""
    with torch.no_grad():
        layer = model.base_model.model.get_submodule(module)
        return layer(torch.tensor(x)[None])[0].double().numpy()
