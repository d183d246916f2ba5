"""Scores the trained demo adapters in scute_jax, all served together, beside PEFT's own scores.

    python -m benchmarks.score_adapters --model SmolLM2-135M-Instruct.Q4_1.gguf --data DATA \
        --out scores.json [--dtype float32] [--examples 200]

Every row of the test sets is a request that names its adapter (the base and stacks among them);
rows of all adapters share batches. What PEFT gave for the same files, in float32, lies in
scute_jax/demo_adapters/scores.json, example by example.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks import adapter_tasks as tasks
from scute_jax.demo_adapters import demo_adapters
from scute_jax.serving import Engine, Request, SamplingParams

TASKS = {"sst2": "margins", "gsm8k": "log_likelihoods"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--examples", type=int, help="only the first so many of each test set")
    args = parser.parse_args()
    folders = demo_adapters()
    peft = json.loads((folders["sst2-lora"].parent / "scores.json").read_text())
    engine = Engine.from_pretrained(
        args.model, dtype=args.dtype, max_adapters=len(folders), memory=2 << 30
    )
    for name, folder in folders.items():
        engine.add_adapter(name, folder)
    chat = tasks.Chat(
        render=engine.tokenizer.apply_chat_template,
        tokenize=lambda text: engine.tokenizer.encode(text, add_special_tokens=False),
        end_id=engine.tokenizer.eos_token_id,
    )
    jobs = {}  # name -> (task, stack)
    for name, record in peft["adapters"].items():
        if record["task"] in args.tasks:
            jobs[name] = (record["task"], record["stack"])
    for task in args.tasks:
        jobs[f"base on {task}"] = (task, None)
    began = time.monotonic()
    ours = score_all(engine, chat, jobs, args.data, args.examples)
    rows = [compare(name, task, ours[name], peft) for name, (task, _) in jobs.items()]
    report(rows, time.monotonic() - began, args)


def score_all(engine, chat, jobs, data: Path, limit: int | None) -> dict[str, dict]:
    """Name -> score; requests of all names are mixed example by example."""
    examples = {t: tasks.read_examples(data, t, "test")[:limit] for t in TASKS}
    rows = {task: tasks.scoring_rows(task, examples[task], chat) for task in TASKS}
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    keys, requests = [], []
    for i in range(max(map(len, rows.values()))):
        for name, (task, stack) in jobs.items():
            if i < len(rows[task]):
                row = rows[task][i]
                keys.append((name, i, len(row.answer)))
                requests.append(
                    Request(
                        prompt_token_ids=[*row.prompt, *row.answer],
                        adapter=None if stack is None else list(stack),
                        sampling=sampling,
                        id=str(len(keys) - 1),
                    )
                )
    sums = {name: np.zeros(len(rows[task])) for name, (task, _) in jobs.items()}
    done, said = 0, time.monotonic()
    for chunk in engine.stream(requests):
        if chunk.completion is None:
            continue
        if chunk.completion.error:
            raise RuntimeError(chunk.completion.error)
        name, i, answer = keys[int(chunk.id)]
        sums[name][i] = sum(chunk.completion.prompt_logprobs[-answer:])
        done += 1
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"{done} of {len(requests)} rows", flush=True)
    return {
        name: tasks.score(task, examples[task], rows[task], sums[name])
        for name, (task, _) in jobs.items()
    }


def compare(name: str, task: str, ours: dict, peft: dict) -> dict:
    """Our score beside PEFT's over the same examples, and the largest gap of one example."""
    theirs = peft["base"][task] if name.startswith("base") else peft["adapters"][name]["score"]
    each = TASKS[task]
    count = len(ours[each])
    gap = np.abs(np.array(ours[each]) - np.array(theirs[each][:count]))
    row = {"name": name, "task": task, "examples": count, "largest_gap": float(gap.max())}
    if task == "sst2":
        row |= {"ours": ours["accuracy"], "peft": theirs["accuracy"]}
        if count < len(theirs[each]):
            row["peft"] = None
        row["difference"] = None if row["peft"] is None else row["ours"] - row["peft"]
        return row
    mean = float(np.mean(theirs[each][:count]))
    row |= {"ours": ours["log_likelihood_per_answer"], "peft": mean}
    row["difference"] = 100 * (row["ours"] - mean) / abs(mean)
    return row


def report(rows: list[dict], seconds: float, args: argparse.Namespace) -> None:
    print(f"{'adapter':20} {'ours':>9} {'PEFT':>9} {'difference':>12} {'largest gap of one':>20}")
    for row in rows:
        unit = "points" if row["task"] == "sst2" else "%"
        peft = "-" if row["peft"] is None else f"{row['peft']:.3f}"
        difference = "-" if row["difference"] is None else f"{row['difference']:+.3f} {unit}"
        print(
            f"{row['name']:20} {row['ours']:9.3f} {peft:>9} {difference:>12} "
            f"{row['largest_gap']:15.4f} nats"
        )
    facts = {
        "dtype": args.dtype,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "seconds": round(seconds, 1),
        "command": "python -m benchmarks.score_adapters --model SmolLM2-135M-Instruct.Q4_1.gguf "
        f"--data DATA --dtype {args.dtype}",
    }
    if args.out:
        args.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
