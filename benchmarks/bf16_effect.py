"""The error of bfloat16 serving as a share of each adapter's effect, on the real model.

    python -m benchmarks.bf16_effect --model SmolLM2-135M-Instruct.Q4_1.gguf --data DATA --out FILE

Amplified adapters of every method are made with the PEFT library and served in one batch in
bfloat16; the oracle is PEFT in float32 (no TF32) on the same bfloat16-rounded base and files. For
each adapter: mean |log-probability - oracle| over the tokens of the texts, divided by mean
|oracle - base|, which is what the adapter does. Beside it stands the same error of PEFT itself when
it runs the model in bfloat16.
"""

import argparse
import copy
import json
import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
import peft
import torch
import transformers

from benchmarks.adapter_tasks import read_examples
from benchmarks.recipes import five_methods, make
from scute_jax.serving import Engine, Request, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3, help="adapters of each kind")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    twin = rounded_twin(args.model).to(device)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            (name, seed): make(twin, name, seed, config, scale, Path(scratch))
            for name, (config, scale) in five_methods().items()
            for seed in range(args.seeds)
        }
        engine = Engine.from_pretrained(
            args.model, dtype="bfloat16", max_adapters=len(folders), memory=2 << 30
        )
        for folder in folders.values():
            engine.add_adapter(folder.name, folder)
        examples = read_examples(args.data, "gsm8k", "test")[: args.texts]
        texts = [engine.tokenizer.encode(f"{e.user}\n{e.answer}") for e in examples]
        ours = serve(engine, [None, *(folder.name for folder in folders.values())], texts)
        base = [oracle(twin, ids) for ids in texts]
        rows = [{"adapter": "base", "error": mean_gap(ours[None], base)}]
        half = copy.deepcopy(twin).bfloat16()
        gaps: dict[str, list[tuple[float, float, float]]] = {name: [] for name, _ in folders}
        for (name, _), folder in folders.items():
            expected, of_peft = (adapted(model, folder, texts) for model in (twin, half))
            gaps[name].append(
                (
                    mean_gap(ours[folder.name], expected),
                    mean_gap(expected, base),
                    mean_gap(of_peft, expected),
                )
            )
        for name, each in gaps.items():
            error, effect, peft_error = np.mean(each, axis=0).tolist()
            row = {"error": error, "effect": effect, "peft_error": peft_error, "each": each}
            rows.append({"adapter": name} | row)
    report(rows, device, args.out)


def rounded_twin(model: Path):
    """The base in transformers, float32, its weights rounded to bfloat16 as the engine has them."""
    twin = transformers.AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    )
    for field in ("quantization_config", "_model_name_or_path"):  # of GGUF: not to be saved
        twin.config.__dict__.pop(field, None)
    plain = type(twin)(twin.config)
    plain.load_state_dict({k: v.bfloat16().float() for k, v in twin.state_dict().items()})
    return plain.eval()


def serve(engine: Engine, names, texts) -> dict[str | None, list[np.ndarray]]:
    """The log-probabilities of every text under every adapter, all in one batch."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    keys = [(name, i) for i in range(len(texts)) for name in names]
    requests = [Request(prompt_token_ids=texts[i], adapter=n, sampling=sampling) for n, i in keys]
    found: dict[str | None, list[np.ndarray]] = {name: [] for name in names}
    for (name, _), completion in zip(keys, engine.generate(requests), strict=True):
        if completion.error:
            raise RuntimeError(f"{name}: {completion.error}")
        found[name].append(np.array(completion.prompt_logprobs[1:]))
    return found


def adapted(twin, folder: Path, texts) -> list[np.ndarray]:
    """The log-probabilities of PEFT over this base, in the base's dtype."""
    model = peft.PeftModel.from_pretrained(twin, folder).eval()
    found = [oracle(model, ids) for ids in texts]
    model.unload()
    return found


def oracle(model, ids: list[int]) -> np.ndarray:
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    with torch.no_grad():
        scores = torch.log_softmax(model(tokens).logits[0].double(), -1)
    return scores[torch.arange(len(ids) - 1), tokens[0, 1:]].cpu().numpy()


def mean_gap(left, right) -> float:
    return float(np.mean(np.abs(np.concatenate(left) - np.concatenate(right))))


def report(rows: list[dict], device: str, out: Path | None) -> None:
    print(f"{'adapter':16} {'error':>8} {'effect':>8} {'share':>7} {'PEFT in bf16':>13}   nats")
    for row in rows:
        nan = float("nan")
        row["share"], row["peft_share"] = (
            row.get(error, nan) / row.get("effect", nan) for error in ("error", "peft_error")
        )
        print(
            f"{row['adapter']:16} {row['error']:8.4f} {row.get('effect', nan):8.3f} "
            f"{100 * row['share']:6.2f}% {100 * row['peft_share']:12.2f}%"
        )
    versions = {m.__name__: m.__version__ for m in (jax, peft, torch, transformers)}
    facts = {"jax backend": jax.default_backend(), "oracle on": device, "versions": versions}
    if out:
        out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
