"""What adapters that are not served add to each projection, taken from the PEFT library itself.

    checkpoint -> PEFT loads and runs it -> [probe each module] -> (site, Delta) ...

A module that PEFT has changed is applied to the identity, which gives its matrix whatever the
method; that it is a matrix is checked on activations of the whole model. Needs torch, transformers
and peft, which nothing else in scute_jax imports.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from scute_jax.delta import Delta, norm_before, through_norm
from scute_jax.errors import AdapterError
from scute_jax.peft.base import EMBEDDING, Base
from scute_jax.peft.checkpoint import open_checkpoint
from scute_jax.peft.names import PREFIX, some
from scute_jax.peft.weights import BaseWeights

ROWS = 512  # of the identity at a time
SEQUENCES, LENGTH = 2, 24  # of the tokens whose activations show whether a module is a matrix
LINEAR = 1e-3  # what a matrix may miss of a module's effect, and of its output, in float32
ROUNDING = 1e-5
PER_TOKEN = ("alora_invocation_tokens", "arrow_config")  # fields of LoRAs that choose tokens
WHY = "what an adapter adds is told from the base's own output"


def dense_deltas(
    path: str | PathLike, model: Path, config: Any, params: Any
) -> Iterator[tuple[str, Delta]]:
    """What the checkpoint adds to the embedding and each projection it changes, one at a time.

    `model` is the folder or GGUF file of the base as transformers loads it; `config` and `params`
    are those of the same base here. Dtypes: PEFT runs in float32.
    Raises: AdapterError if PEFT is not installed, cannot load the checkpoint in full, or makes of
    it something else than a matrix at each projection.
    """
    options, tensors = open_checkpoint(path)
    for name in PER_TOKEN:
        if options.get(name):
            options.refuse(name, "such an adapter acts on some tokens only, and a LoRA on all")
    base = Base.from_config(config)
    run = _load(Path(path), model, base)
    _check_whole(run, {key: tensors.read(key) for key in tensors.shapes}, tensors.path)
    _check_places(run, base, tensors.path)
    run.run_once(base)
    weights, scales = BaseWeights(params, base), run.norm_scales()
    E = weights.module_weight(EMBEDDING, WHY)
    if (rows := run.embedding(E)) is not None:
        yield EMBEDDING.removeprefix("model."), Delta(rows - np.float64(E))
    for p in base.projections:
        W, bias = np.float64(weights.weight(p, WHY)), weights.bias(p, WHY)
        delta = run.probe(p.module, W, bias)
        if delta is not None and not run.is_linear(p.module, W, bias, delta):
            raise AdapterError(
                f"{tensors.path}: {p.module}: what PEFT computes here is no matrix times x (the "
                "adapter looks at other tokens, at its batch, or at x twice), so no LoRA stands "
                "for it."
            )
        scale = scales.get(norm_before(p.site))
        if scale is not None:
            delta = through_norm(delta or Delta(np.zeros(W.shape)), W, scale, None)
        if delta is not None:
            yield p.site, delta


@dataclass
class _Run:
    """The model as PEFT runs it, and what it computed."""

    model: Any  # PeftModel
    norms: dict[str, np.ndarray]  # module -> what the base's norm makes of ones
    seen: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # inputs, outputs

    def layer(self, module: str) -> Any:
        return self.model.base_model.model.get_submodule(module)

    def apply(self, module: str, x: np.ndarray) -> np.ndarray:
        """The output of one module for the rows of x, as float64."""
        import torch

        with torch.no_grad():
            return _host(self.layer(module)(torch.tensor(x)[None])[0])

    def run_once(self, base: Base) -> None:
        """Keeps what each changed projection gets and gives in one pass of the whole model."""
        import torch

        def keep(module: str):
            def hook(_layer: Any, inputs: Any, output: Any) -> None:
                x, y = (_host(a).reshape(-1, a.shape[-1]) for a in (inputs[0], output))
                self.seen[module] = x, y

            return hook

        modules = [p.module for p in base.projections if not self._is_plain(p.module)]
        hooks = [self.layer(m).register_forward_hook(keep(m)) for m in modules]
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, base.vocab, (SEQUENCES, LENGTH))
        with torch.no_grad():
            self.model(input_ids=torch.tensor(tokens))
        for hook in hooks:
            hook.remove()

    def _is_plain(self, module: str) -> bool:
        import torch

        return type(self.layer(module)) is torch.nn.Linear

    def probe(
        self, module: str, W: Float[np.ndarray, "d_in d_out"], bias: np.ndarray | None
    ) -> Delta | None:
        """What the module adds to x W + bias; None if nothing."""
        if self._is_plain(module):
            D, shift = _host(self.layer(module).weight).T - W, np.zeros(W.shape[1])
        else:
            shift = self.apply(module, np.zeros((1, len(W)), np.float32))[0]
            eye = np.eye(len(W), dtype=np.float32)
            rows = [self.apply(module, eye[i : i + ROWS]) for i in range(0, len(W), ROWS)]
            D = np.concatenate(rows) - shift - W
            shift = shift if bias is None else shift - bias
        if np.abs(D).max() <= ROUNDING * np.abs(W).max() and not shift.any():
            return None
        return Delta(D, None, shift if shift.any() else None)

    def is_linear(self, module: str, W: np.ndarray, bias: np.ndarray | None, delta: Delta) -> bool:
        """Whether x (W + D) + shift is what the module computed in the whole model."""
        if module not in self.seen:
            return True
        x, y = self.seen[module]
        effect = x @ delta.matrix() + (0 if delta.shift is None else delta.shift)
        off = y - x @ W - (0 if bias is None else bias) - effect
        bound = LINEAR * np.linalg.norm(effect) + ROUNDING * np.linalg.norm(y)
        return bool(np.linalg.norm(off) <= bound)

    def norm_scales(self) -> dict[str, np.ndarray]:
        """Site of a norm that PEFT changed -> the vector by which its output is scaled."""
        scales = {}
        for module, before in self.norms.items():
            after = self.apply(module, np.ones((1, len(before)), np.float32))[0]
            if not np.allclose(after, before, rtol=ROUNDING):
                if not before.all():
                    raise AdapterError(f"{module}: the base's own norm has zeros, but it changes.")
                scales[module.removeprefix("model.")] = after / before
        return scales

    def embedding(self, E: Float[np.ndarray, "vocab d"]) -> np.ndarray | None:
        """The rows of the embedding as PEFT has them; None if they are those of the base."""
        import torch

        with torch.no_grad():
            rows = _host(self.layer(EMBEDDING)(torch.arange(len(E))[None])[0])
        return None if np.abs(rows - E).max() <= ROUNDING * np.abs(E).max() else rows


def _load(path: Path, model: Path, base: Base) -> _Run:
    """The base in transformers, its norms, and the checkpoint on it."""
    try:
        import peft
        import torch
        import transformers
    except ImportError as error:
        raise AdapterError(
            f"{path}: this adapter is not served, and what it adds can only be taken from the PEFT "
            f"library, which is not here ({error}); pip install torch transformers peft."
        ) from None
    place = {"pretrained_model_name_or_path": model}
    if model.is_file():
        place = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
            run = _Run(plain, {})
            ones = torch.ones((1, 1, base.hidden))
            with torch.no_grad():
                for name in (module for module in base.others if module != EMBEDDING):
                    run.norms[name] = _host(plain.get_submodule(name)(ones)[0, 0])
            run.model = peft.PeftModel.from_pretrained(plain, str(path)).eval()
        except Exception as error:  # of any kind: three libraries raise what they like
            raise AdapterError(f"{path}: PEFT cannot load it either: {error}") from error
    return run


def _check_whole(run: _Run, held: dict[str, np.ndarray], path: Path) -> None:
    """Raises AdapterError unless PEFT has every tensor of the file, and no other of its own."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = peft.get_peft_model_state_dict(run.model, save_embedding_layers=False)
    missing, left = (sorted(a.keys() - b.keys()) for a, b in ((own, held), (held, own)))
    shared = own.keys() & held.keys()
    other = [key for key in sorted(shared) if not np.allclose(_host(own[key]), held[key])]
    problems = (
        (missing, "missing"),
        (left, "of no use to PEFT"),
        (other, "read otherwise by PEFT, or not finite"),
    )
    said = [f"{len(keys)} tensor(s) {problem}: {some(keys)}" for keys, problem in problems if keys]
    if said:
        raise AdapterError(f"{path}: {'; '.join(said)}. It is converted whole or not at all.")


def _check_places(run: _Run, base: Base, path: Path) -> None:
    """Raises AdapterError if the adapter has parts elsewhere than at modules that are probed."""
    known = tuple(f"{PREFIX}{m}." for m in (*base.others, *(p.module for p in base.projections)))
    odd = [
        name
        for name, _ in run.model.named_parameters()
        if name.startswith(PREFIX) and not name.startswith(known)
    ]
    learned = run.model.active_peft_config.is_prompt_learning
    if odd or learned:
        what = "virtual tokens" if learned else some(odd)
        raise AdapterError(
            f"{path}: it adds {what}, which is no change of a projection, so no LoRA stands for it."
        )


def _host(tensor: Any) -> np.ndarray:
    return tensor.detach().double().numpy()
