"""Scores the trained demo adapters in scute_jax, all served together, beside PEFT's own scores.

    python -m benchmarks.score_adapters --model SmolLM2-135M-Instruct.Q4_1.gguf --data DATA \
        --out scores.json [--dtype float32] [--examples 200] [--near 1.0]

Every row of the test sets is a request that names its adapter (the base and stacks among them);
rows of all adapters share batches. What PEFT gave for the same files, in float32, lies in
scute_jax/demo_adapters/scores.json, example by example. With `--near` only sentences run whose
margin in PEFT is below so many nats: the label of another can change only if its margin moves by
more, and the accuracy counts it as PEFT does.
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
    parser.add_argument("--near", type=float, help="only sentences with smaller margins in PEFT")
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
    for task in args.tasks if args.near is None else ():
        jobs[f"base on {task}"] = (task, None)
    began = time.monotonic()
    wanted = {n: chosen(reference(n, t, peft), t, args) for n, (t, _) in jobs.items()}
    ours = score_all(engine, chat, jobs, args.data, wanted)
    positive = tasks.read_examples(args.data, "sst2", "test")
    positive = np.array([example.answer == "positive" for example in positive])
    rows = [
        compare(name, task, ours[name], reference(name, task, peft), wanted[name], positive)
        for name, (task, _) in jobs.items()
    ]
    report(rows, time.monotonic() - began, args)


def reference(name: str, task: str, peft: dict) -> np.ndarray:
    """What PEFT gave for each example: margins or log-likelihoods."""
    score = peft["base"][task] if name.startswith("base") else peft["adapters"][name]["score"]
    return np.array(score[TASKS[task]])


def chosen(theirs: np.ndarray, task: str, args: argparse.Namespace) -> np.ndarray:
    """Which examples run."""
    wanted = np.arange(len(theirs)) < (args.examples or len(theirs))
    if args.near is not None and task == "sst2":
        wanted &= np.abs(theirs) < args.near
    return wanted


def score_all(engine, chat, jobs, data: Path, wanted: dict) -> dict[str, np.ndarray]:
    """Name -> margin or log-likelihood of each example, NaN for those that do not run.

    Requests of all names are mixed example by example.
    """
    examples = {t: tasks.read_examples(data, t, "test") for t in TASKS}
    rows = {task: tasks.scoring_rows(task, examples[task], chat) for task in TASKS}
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    keys, requests = [], []
    for i in range(max(map(len, rows.values()))):
        for name, (task, stack) in jobs.items():
            each = len(rows[task]) // len(examples[task])  # rows of an example
            if i < len(rows[task]) and wanted[name][i // each]:
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
    sums = {name: np.full(len(rows[task]), np.nan) for name, (task, _) in jobs.items()}
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
        name: sums[name] if task == "gsm8k" else sums[name][1::2] - sums[name][::2]
        for name, (task, _) in jobs.items()
    }


def compare(
    name: str,
    task: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    ran: np.ndarray,
    positive: np.ndarray,
) -> dict:
    """Our score beside PEFT's over the same examples, and the largest gap of one that ran."""
    row = {"name": name, "task": task, "examples": len(theirs), "ran": int(ran.sum())}
    row["largest_gap"] = float(np.abs(ours - theirs)[ran].max())
    if task == "sst2":
        measured = accuracy(np.where(ran, ours, theirs), positive)
        expected = accuracy(theirs, positive)
        return row | {"ours": measured, "peft": expected, "difference": measured - expected}
    measured, expected = float(ours[ran].mean()), float(theirs[ran].mean())
    difference = 100 * (measured - expected) / abs(expected)
    return row | {"ours": measured, "peft": expected, "difference": difference}


def accuracy(margins: np.ndarray, positive: np.ndarray) -> float:
    return float(100 * np.mean((margins > 0) == positive))


def report(rows: list[dict], seconds: float, args: argparse.Namespace) -> None:
    print(
        f"{'adapter':20} {'ran':>5} {'ours':>9} {'PEFT':>9} {'difference':>15} "
        f"{'largest gap of one':>20}"
    )
    for row in rows:
        unit = "points" if row["task"] == "sst2" else "%"
        difference = f"{row['difference']:+.3f} {unit}"
        print(
            f"{row['name']:20} {row['ran']:5} {row['ours']:9.3f} {row['peft']:9.3f} "
            f"{difference:>15} {row['largest_gap']:15.5f} nats"
        )
    facts = {
        "dtype": args.dtype,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "seconds": round(seconds, 1),
        "command": "python -m benchmarks.score_adapters --model SmolLM2-135M-Instruct.Q4_1.gguf "
        f"--data DATA --dtype {args.dtype} --tasks {' '.join(args.tasks)}"
        + (f" --examples {args.examples}" if args.examples else "")
        + (f" --near {args.near}" if args.near else ""),
    }
    if args.out:
        args.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
