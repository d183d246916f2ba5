"""What an adapter of each method holds at one layer of Llama-3.1-8B: shapes and bytes, as JSON.

    python -m benchmarks.method_shapes --out benchmarks/method_shapes.json

Each adapter is made with the PEFT library on a base of one such layer with random weights, and read
with scute_jax; its folded forms tell the shapes. PSOFT, KaSA and TinyLoRA are not made: they take
singular value decompositions of every matrix, and are terms of their rank afterwards, as LoRA is
(KaSA has a second one, which takes the smallest part of W away).
"""

import argparse
import copy
import json
import tempfile
import time
import warnings
from pathlib import Path

import peft
import torch
import transformers

import scute_jax as sj
from benchmarks.recipes import all_methods, move, write
from scute_jax.entries import entries
from scute_jax.models.adapters import for_llama
from scute_jax.models.checkpoint import load_model

OF_SVD = {"PSOFT": 1, "KaSA": 2, "TinyLoRA": 1}  # terms at each target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    torch.manual_seed(0)
    twin = transformers.LlamaForCausalLM(config).eval()
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        twin.save_pretrained(base)
        loaded = load_model(base, dtype="float32")
        for name, (peft_config, scale) in all_methods().items():
            if name in found or (args.only and name not in args.only):
                continue
            began = time.monotonic()
            if name in OF_SVD:
                found[name] = of_terms(twin, peft_config, OF_SVD[name])
            else:
                own_config = copy.deepcopy(peft_config)
                found[name] = one(twin, loaded, name, own_config, scale, Path(scratch))
            print(
                f"{name}: {found[name]['bytes']:,} bytes, {time.monotonic() - began:.0f} s",
                flush=True,
            )
            args.out.write_text(json.dumps(found) + "\n")


def one(twin, loaded, name, peft_config, scale, scratch: Path) -> dict:
    """The shapes of the adapter's forms at every site, and the bytes that it owns in bfloat16."""
    model = peft.get_peft_model(twin, peft_config)
    move(model, 0, scale)
    folder = write(model, name, 0, scratch)
    config, params = loaded
    adapter = for_llama(sj.load_peft(folder, config, params=params))
    forms = adapter.sites
    in_layer, elsewhere = (
        {s: f for s, f in forms.items() if s.startswith("layers.") == here}
        for here in (True, False)
    )
    return {
        "bytes": sum(map(own_bytes, in_layer.values())),
        "elsewhere": sum(map(own_bytes, elsewhere.values())),  # once for the whole model
        "live": sorted({slot for form in forms.values() for slot in form.live}),
        "sites": {site: shape_of(form) for site, form in forms.items()},
    }


def of_terms(twin, peft_config, count: int, itemsize: int = 2) -> dict:
    """As `one`, for a method whose form is `count` terms of its own at each target."""
    modules = dict(twin.model.named_modules())
    targets = [n for n in modules if n.rpartition(".")[2] in peft_config.target_modules]
    widths = sum(modules[n].in_features + modules[n].out_features for n in targets)
    terms = [{"rank": peft_config.r, "shared": False, "u": False}] * count
    shape = shape_of(sj.NormalForm()) | {"terms": terms}
    own = itemsize * count * peft_config.r * widths
    return {"bytes": own, "elsewhere": 0, "live": [], "sites": dict.fromkeys(targets, shape)}


def own_bytes(form: sj.NormalForm, itemsize: int = 2) -> int:
    """Bytes of a folded form without the factors that it shares; indices take four."""
    total = 0
    for own in entries(form).values():
        for entry in own:
            for part, array in entry.items():
                index = part in ("cols", "ids") or (part == "rows" and array.ndim == 1)
                total += array.size * (4 if index else itemsize)
    return total


def shape_of(form: sj.NormalForm) -> dict:
    """What `benchmarks.method_costs` needs to make a form of the same shapes."""
    return {
        "R": None if form.R is None else form.R.shape[-1],
        "s": form.s is not None,
        "b": form.b is not None,
        "P": [blocks.values.shape[-1] for blocks in form.P],
        "Q": [blocks.values.shape[-1] for blocks in form.Q],
        "S": None if form.S is None else form.S.values.size,
        "K": [[*product.left.shape, *product.right.shape] for product in form.K],
        "terms": [
            {"rank": term.rank, "shared": term.pair is not None, "u": term.u is not None}
            for term in form.terms
        ],
    }


if __name__ == "__main__":
    main()
