"""Adapters of all methods in one batch: their error in bfloat16, and what the pool costs to decode.

    python -m benchmarks.method_pool --model SmolLM2-135M-Instruct.Q4_1.gguf --data DATA --out FILE

One adapter of each method is made with the PEFT library and served, all in one batch, in bfloat16;
the oracle is PEFT in float32 on the same bfloat16-rounded base and numbers. Then the same number of
LoRA adapters of rank 16 is decoded beside the pool: the same rows, lengths and settings.
"""

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path

import jax
import peft
import safetensors.numpy
import torch
import transformers

from benchmarks.adapter_tasks import read_examples
from benchmarks.bf16_effect import mean_gap, oracle, rounded_twin, serve
from benchmarks.recipes import all_methods, make_with_effect
from scute_jax.serving import Engine, Request, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="rows of each adapter when decoding")
    parser.add_argument("--only", nargs="*", help="some methods")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    twin = rounded_twin(args.model).to(device)
    engine = Engine.from_pretrained(args.model, dtype="bfloat16", max_adapters=48, memory=2 << 30)
    examples = read_examples(args.data, "gsm8k", "test")[: args.texts]
    texts = [engine.tokenizer.encode(f"{e.user}\n{e.answer}") for e in examples]
    with tempfile.TemporaryDirectory() as scratch:
        made = make_all(twin, texts, Path(scratch), args.only)
        print(f"{len(made)} adapters made after {time.monotonic() - began:.0f} s", flush=True)
        rows = errors(engine, made, texts)
        report = {"methods": rows, "versions": versions(), "device": jax.devices()[0].device_kind}
        save(args.out, report)
        print(f"errors after {time.monotonic() - began:.0f} s", flush=True)
        report["decode"] = decode(args, engine, made, Path(scratch))
        save(args.out, report)
    print(f"done after {time.monotonic() - began:.0f} s")


def make_all(twin, texts, scratch: Path, only) -> dict[str, tuple[Path, list, float]]:
    """Method -> (folder, log-probabilities of PEFT in float32, its effect)."""
    base = [oracle(twin, ids) for ids in texts]

    def run(model):
        found = [oracle(model, ids) for ids in texts]
        return mean_gap(found, base), found

    made = {}
    for name, (config, scale) in all_methods().items():
        if only and name not in only:
            continue
        folder, found = make_with_effect(twin, name, config, scale, scratch, run)
        made[name] = (folder, found, mean_gap(found, base))
    return made


def errors(engine, made, texts) -> list[dict]:
    """Adds all adapters, serves all texts under all of them in one batch, and prints a table."""
    for name, (folder, _, _) in made.items():
        engine.add_adapter(name, folder)
    ours = serve(engine, [None, *made], texts)
    print(f"{'method':12} {'error':>8} {'effect':>8} {'share':>7}   nats, mean over tokens")
    rows = []
    for name, (_, expected, effect) in made.items():
        error = mean_gap(ours[name], expected)
        rows.append({"method": name, "error": error, "effect": effect, "share": error / effect})
        print(f"{name:12} {error:8.4f} {effect:8.3f} {100 * error / effect:6.2f} %", flush=True)
    return rows


def decode(args, pool: Engine, made, scratch: Path) -> dict:
    """Milliseconds a decode step of the pool and of as many LoRA adapters, and of the base."""
    names = [f"lora-{i}" for i in range(len(made))]
    lora = Engine.from_pretrained(args.model, dtype="bfloat16", max_adapters=48, memory=2 << 30)
    for i, name in enumerate(names):
        lora.add_adapter(name, copy_of(made["LoRA"][0], 1 + i / 100, scratch / name))
    count = args.rows * len(made)
    found = {
        "rows": count,
        "base": step_ms(lora, [None] * count),
        "lora": step_ms(lora, names * args.rows),
        "pool": step_ms(pool, list(made) * args.rows),
    }
    print(
        f"decode, {count} rows, ms a step: base {found['base']:.3f}, LoRA {found['lora']:.3f}, "
        f"pool {found['pool']:.3f}: {found['pool'] / found['lora']:.3f} of LoRA"
    )
    return found


def copy_of(folder: Path, factor: float, to: Path) -> Path:
    """The LoRA with all its A multiplied: other numbers of the same shapes."""
    to.mkdir()
    (to / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    moved = {key: value * factor if "lora_A" in key else value for key, value in tensors.items()}
    safetensors.numpy.save_file(moved, to / "adapter_model.safetensors")
    return to


def step_ms(engine: Engine, adapters) -> float:
    """The difference between long and short generations, a step; compiled before it is timed."""

    def seconds(tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        requests = [
            Request(prompt_token_ids=[7 + i, 11, 13, 17], adapter=adapter, sampling=sampling)
            for i, adapter in enumerate(adapters)
        ]
        began = time.perf_counter()
        for completion in engine.generate(requests):
            if completion.error:
                raise RuntimeError(completion.error)
        return time.perf_counter() - began

    seconds(224)
    return min((seconds(224) - seconds(32)) / 192 * 1e3 for _ in range(3))


def versions() -> dict[str, str]:
    return {m.__name__: m.__version__ for m in (jax, peft, torch, transformers)}


def save(out: Path | None, report: dict) -> None:
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
