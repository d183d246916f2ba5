"""Adapters of all methods in one batch: the error of each in bfloat16.

    python -m benchmarks.method_pool --model SmolLM2-135M-Instruct.Q4_1.gguf --data DATA --out FILE

One adapter of each method is made with the PEFT library and served, all in one batch, in bfloat16;
the oracle is PEFT in float32 on the same bfloat16-rounded base and numbers. `--layers` keeps the
first layers of the base only, which shortens the compilation. With `--adapters DIR`, what is made
is kept there with the numbers of the oracle, and found there again: it can be made on one machine
and served on another. What the pool costs to decode is in `method_costs.py`.
"""

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import peft
import torch
import transformers

from benchmarks.adapter_tasks import read_examples
from benchmarks.bf16_effect import mean_gap, oracle, rounded_twin, serve
from benchmarks.command import command
from benchmarks.recipes import all_methods, make_with_effect, slug
from scute_jax.models.tokenizer import load_tokenizer
from scute_jax.serving import Engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--layers", type=int, help="of the base; all if not given")
    parser.add_argument("--only", nargs="*", help="some methods")
    parser.add_argument("--adapters", type=Path, help="where adapters are kept, and found again")
    parser.add_argument("--make", action="store_true", help="only make them")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    began = time.monotonic()
    twin = rounded_twin(args.model)  # on the CPU: PSOFT's basis is that of the device it is made on
    tokenizer = load_tokenizer(args.model)
    examples = read_examples(args.data, "gsm8k", "test")[: args.texts]
    texts = [tokenizer.encode(f"{e.user}\n{e.answer}") for e in examples]
    with tempfile.TemporaryDirectory() as scratch:
        if args.layers:
            twin.model.layers = twin.model.layers[: args.layers]
            twin.config.num_hidden_layers = args.layers
            twin.config.layer_types = None
        twin.save_pretrained(Path(scratch) / "base")
        made = make_all(twin, texts, args.adapters or Path(scratch), args.only)
        print(f"{len(made)} adapters made after {time.monotonic() - began:.0f} s", flush=True)
        if args.make:
            return
        engine = Engine.from_pretrained(
            Path(scratch) / "base", dtype="bfloat16", max_adapters=len(made), memory=2 << 30
        )
        base = [oracle(twin, ids) for ids in texts]
        rows, base_error = errors(engine, made, texts, base)
    facts = {"layers": len(twin.model.layers), "device": jax.devices()[0].device_kind}
    facts |= {"base_error": base_error, "command": command()}
    versions = {m.__name__: m.__version__ for m in (jax, peft, torch, transformers)}
    if args.out:
        report = {"facts": facts | {"versions": versions}, "methods": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"done after {time.monotonic() - began:.0f} s")


def make_all(twin, texts, kept: Path, only) -> dict[str, tuple[Path, list, float]]:
    """Method -> (folder, log-probabilities of PEFT in float32, its effect)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = [oracle(twin, ids) for ids in texts]

    def run(model):
        found = [oracle(model.to(device), ids) for ids in texts]
        return mean_gap(found, base), found

    made = {}
    for name, (config, scale) in all_methods().items():
        if only and name not in only:
            continue
        numbers = kept / f"{slug(name)}.npz"
        if numbers.exists():
            folder, found = kept / f"{slug(name)}-0", list(np.load(numbers).values())
        else:
            folder, found = make_with_effect(twin, name, config, scale, kept, run)
            np.savez(numbers, *found)
        made[name] = (folder, found, mean_gap(found, base))
        print(f"{name}: {made[name][2]:.2f} nats", flush=True)
    return made


def errors(engine, made, texts, base) -> tuple[list[dict], float]:
    """Adds all adapters, serves all texts under all of them in one batch, and prints a table.

    Also returns the error of the base rows: what is left where an adapter adds none of its own.
    """
    for name, (folder, _, _) in made.items():
        engine.add_adapter(name, folder)
    ours = serve(engine, [None, *made], texts)
    print(f"{'method':12} {'error':>8} {'effect':>8} {'share':>7}   nats, mean over tokens")
    rows = []
    for name, (_, expected, effect) in made.items():
        error = mean_gap(ours[name], expected)
        rows.append({"method": name, "error": error, "effect": effect, "share": error / effect})
        print(f"{name:12} {error:8.4f} {effect:8.3f} {100 * error / effect:6.2f} %", flush=True)
    base_error = mean_gap(ours[None], base)
    print(f"{'base rows':12} {base_error:8.4f}")
    return rows, base_error


if __name__ == "__main__":
    main()
