"""Train the demo's adapters with the PEFT library on SmolLM2-135M-Instruct and score them in PEFT.

    python -m benchmarks.train_adapters --model SmolLM2-135M-Instruct.Q4_1.gguf \
        --data DATA --out adapters [--only sst2-lora ...] [--steps-scale 0.02] [--archive FILE]

Way of an adapter:

    load_base -> train -> save_rounded -> load_adapted -> answer_sums -> score -> write_results

Each adapter trains in a process of its own, all of them on the one GPU if there is one. What is
scored is what is committed: the checkpoint is rounded to bfloat16 on disk, loaded again by
`PeftModel.from_pretrained` and run in float32 (no TF32). An adapter that stands `on` another one
is trained with that one, as saved, merged into the base: the stack [on, name] is what its score
belongs to.

--out gets one folder an adapter (adapter_config.json, adapter_model.safetensors, README.md), an
index README.md and scores.json with the value of every test example. Needs torch, transformers,
peft and gguf; the data of `benchmarks.adapter_tasks`.
"""

import argparse
import copy
import hashlib
import json
import math
import multiprocessing
import os
import platform
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import adapter_tasks as tasks
from benchmarks.adapter_cards import BASE_MODEL, write_results

# a VeRA without its projections is meant so
warnings.filterwarnings("ignore", message="Specified to not (save|load) vera_A")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
# PEFT up to 0.19 saves these and yet draws them again from the seed when it loads; in float32 the
# two are equal, so that the file means the same in every version
VERA_PROJECTIONS = {"base_model.vera_A", "base_model.vera_B"}
WARMUP = 0.06  # of the training
SCORING_BATCH = 32


@dataclass(frozen=True)
class Recipe:
    """One adapter: PEFT's config and how to train it. `on` names the adapter that it stacks on."""

    name: str
    method: str
    config: peft.PeftConfig
    learning_rate: float
    steps: int
    batch: int
    seed: int
    on: str | None = None

    @property
    def task(self) -> str:
        return self.name.split("-")[0]

    @property
    def stack(self) -> tuple[str, ...]:
        return (self.name,) if self.on is None else (self.on, self.name)


def recipes() -> tuple[Recipe, ...]:
    """The ten adapters: five methods on two tasks, and one that stacks on another."""
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=ATTENTION)
    wide_lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=EVERY_LINEAR)
    dora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=EVERY_LINEAR, use_dora=True)
    ia3 = peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    # the projections of one VeRA lie in its file, those of the other come from its seed; the two
    # pairs differ in shape (without down, whose input is the widest) and in numbers
    saved_vera = peft.VeraConfig(
        r=128, target_modules=EVERY_LINEAR[:-1], projection_prng_key=7, save_projection=True
    )
    seeded_vera = peft.VeraConfig(
        r=256, target_modules=EVERY_LINEAR, projection_prng_key=11, save_projection=False
    )
    oft = peft.OFTConfig(
        r=0, oft_block_size=32, target_modules=["q_proj", "v_proj"], use_cayley_neumann=True
    )
    wide_oft = peft.OFTConfig(
        r=0, oft_block_size=16, target_modules=EVERY_LINEAR, use_cayley_neumann=True
    )
    return (
        Recipe("sst2-lora", "LoRA", lora, 1e-3, 800, 32, 1),
        Recipe("sst2-dora", "DoRA", dora, 1e-3, 800, 32, 2),
        Recipe("sst2-ia3", "(IA)3", ia3, 1e-2, 1000, 32, 3),
        Recipe("sst2-vera", "VeRA", saved_vera, 1e-2, 1000, 32, 4),
        Recipe("sst2-oft", "OFT", oft, 1e-3, 800, 32, 5),
        Recipe("gsm8k-lora", "LoRA", wide_lora, 1e-3, 460, 16, 6),
        Recipe("gsm8k-vera", "VeRA", seeded_vera, 1e-2, 460, 16, 7),
        Recipe("gsm8k-oft", "OFT", wide_oft, 6e-4, 460, 16, 8),
        Recipe("gsm8k-ia3", "(IA)3", ia3, 1e-2, 460, 16, 9),
        Recipe("gsm8k-ia3-on-lora", "(IA)3", ia3, 5e-3, 240, 16, 10, on="gsm8k-lora"),
    )


@dataclass(frozen=True)
class Settings:
    """What a training process needs to know beside its recipes."""

    base: Path  # written by `prepare_base`
    data: Path
    out: Path
    device: str
    seconds: float  # at most, for the training of one chain of recipes
    log_every: int
    test_examples: int | None  # score only so many: for trials
    facts: tuple[tuple[str, str], ...]  # for the card


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right; `rows`, `columns` are the positions that predict `targets`.

    Causal attention needs no mask: nothing looks to the right.
    """

    ids: torch.Tensor  # [b, t]
    rows: torch.Tensor  # [n]
    columns: torch.Tensor  # [n]
    targets: torch.Tensor  # [n]

    @classmethod
    def of(cls, encoded: Sequence[tasks.Row], device: str) -> "Batch":
        full = [(*row.prompt, *row.answer) for row in encoded]
        # the last token of an answer predicts nothing that is asked for
        ids = torch.zeros((len(full), max(map(len, full)) - 1), dtype=torch.long)
        rows, columns, targets = [], [], []
        for i, (row, tokens) in enumerate(zip(encoded, full, strict=True)):
            ids[i, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            rows += [i] * len(row.answer)
            columns += range(len(row.prompt) - 1, len(tokens) - 1)
            targets += row.answer
        tensors = [ids, *map(torch.tensor, (rows, columns, targets))]
        if device == "cuda":  # pinned, so that the host need not wait for the step before
            return cls(*(x.pin_memory().to(device, non_blocking=True) for x in tensors))
        return cls(*tensors)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chains = _chains(args.only, args.out)
    jobs = args.jobs or (len(chains) if device == "cuda" else 1)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    args.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="train_adapters_") as scratch,
        ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads,)) as pool,
    ):
        for _ in range(jobs):  # the processes import torch while the base is being read
            pool.submit(os.getpid)
        base = Path(scratch)
        facts = _facts(args.model, device)
        _say("set up", "; ".join(f"{key} {value}" for key, value in facts), started)
        prepare_base(args.model, base)
        _say("set up", f"base read; {jobs} processes on {device}", started)
        settings = Settings(
            base=base,
            data=args.data,
            out=args.out,
            device=device,
            seconds=args.train_seconds,
            log_every=args.log_every,
            test_examples=args.test_examples,
            facts=facts,
        )
        pending = {
            pool.submit(run_chain, [_scaled(r, args.steps_scale) for r in chain], settings): chain
            for chain in chains
        }
        scores = _read_scores(args.out)
        base_model, chat = load_base(base)
        scores["base"] = {}
        for task in tasks.TASKS:
            scores["base"][task] = score_model(base_model, task, chat, settings)
            _say("base", f"{task}: {tasks.headline(scores['base'][task])}", started)
        failed = []
        for future in as_completed(pending):
            try:
                scores["adapters"].update(future.result())
            except Exception:  # one adapter's failure must not take the others along
                traceback.print_exception(*sys.exc_info())
                failed += [recipe.name for recipe in pending[future]]
    index = write_results(scores, [recipe.name for recipe in recipes()], args.out)
    print(f"\n{index}")
    if args.archive:
        with tarfile.open(args.archive, "w:gz") as archive:
            archive.add(args.out, arcname=args.out.name)
    total = sum(record["bytes"] for record in scores["adapters"].values())
    _say("done", f"{len(scores['adapters'])} adapters, {total / 1e6:.2f} MB", started)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run_chain(chain: Sequence[Recipe], settings: Settings) -> dict[str, dict]:
    """Train, save, score and describe recipes of which each may stand on an earlier one."""
    base, chat = load_base(settings.base)
    device = settings.device
    all_steps = sum(recipe.steps for recipe in chain)
    records = {}
    for recipe in chain:
        seconds = settings.seconds * recipe.steps / all_steps
        model, record = train(recipe, base, chat, settings, seconds)
        folder = settings.out / recipe.name
        save_rounded(model, folder)
        del model
        adapted = load_adapted(base, [settings.out / name for name in recipe.stack], device)
        record["score"] = score_model(adapted, recipe.task, chat, settings)
        del adapted
        if recipe.on is not None:  # what it does alone, without the one that it was trained on
            alone = load_adapted(base, [folder], device)
            record["score_alone"] = score_model(alone, recipe.task, chat, settings)
            del alone
        record["bytes"] = (folder / "adapter_model.safetensors").stat().st_size
        headline = tasks.headline(record["score"])
        _say(recipe.name, f"the saved file in PEFT, float32: {headline}", None)
        records[recipe.name] = record
    return records


def prepare_base(model: Path, folder: Path) -> None:
    """Dequantise the GGUF file once, for all processes: float32 weights, config, tokenizer."""
    name = {"gguf_file": model.name}
    base = transformers.AutoModelForCausalLM.from_pretrained(
        str(model.parent), dtype=torch.float32, **name
    )
    config = base.config.to_dict()
    config.pop("quantization_config", None)  # it is dequantised now
    torch.save({"config": config, "state": base.state_dict()}, folder / "base.pt")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model.parent), **name)
    # transformers leaves out a step of the "smollm" pre-tokenizer of the GGUF file: digits apart
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    torch.save(tokenizer, folder / "tokenizer.pt")


def load_base(folder: Path) -> tuple[torch.nn.Module, tasks.Chat]:
    """The base model in float32 on the CPU, and its tokenizer."""
    saved = torch.load(folder / "base.pt")
    config = transformers.LlamaConfig.from_dict(saved["config"])
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(saved["state"])
    # written by prepare_base a minute ago: safe to unpickle
    tokenizer = torch.load(folder / "tokenizer.pt", weights_only=False)

    def render(messages: list[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def tokenize(text: str) -> list[int]:
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    return model.eval().requires_grad_(False), tasks.Chat(render, tokenize, config.eos_token_id)


def train(
    recipe: Recipe, base: torch.nn.Module, chat: tasks.Chat, settings: Settings, seconds: float
) -> tuple[peft.PeftModel, dict]:
    """The trained model and a record of the training. The schedule also ends by time.

    The learning rate falls linearly over the steps or over `seconds`, whichever ends first; only a
    machine too slow for the steps makes the result depend on its speed, and the record says so.
    """
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")  # TF32: finer than bf16 autocast, fewer kernels
    below = [settings.out / name for name in recipe.stack[:-1]]
    frozen = load_merged(base, below, settings.device)
    model = peft.get_peft_model(frozen, copy.deepcopy(recipe.config))
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    model.peft_config["default"].task_type = "CAUSAL_LM"
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, recipe.learning_rate, weight_decay=0.0, fused=True)
    examples = tasks.read_examples(settings.data, recipe.task, "train")
    batches = tasks.training_batches(examples, chat, recipe.steps, recipe.batch, recipe.seed)
    started = time.monotonic()
    losses = []
    for step, encoded in enumerate(batches):
        progress = max(step / len(batches), (time.monotonic() - started) / seconds)
        if progress >= 1:
            break
        factor = min(progress / WARMUP + 1e-2, (1 - progress) / (1 - WARMUP))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, factor)
        optimizer.zero_grad(set_to_none=True)
        loss = -answer_log_probs(model, Batch.of(encoded, settings.device)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if (step + 1) % settings.log_every == 0 or step + 1 == len(batches):
            mean = torch.stack(losses[-settings.log_every :]).mean().item()
            if not math.isfinite(mean):
                raise FloatingPointError(
                    f"{recipe.name}: loss {mean} at step {step + 1}; lower its learning rate."
                )
            _say(recipe.name, f"step {step + 1}/{len(batches)}  loss {mean:.4f}", started)
    if len(losses) < len(batches):
        _say(recipe.name, f"time is up after {len(losses)} of {len(batches)} steps", started)
    tenth = max(1, len(losses) // 10)
    record = {
        "task": recipe.task,
        "method": recipe.method,
        "stack": list(recipe.stack),
        "steps": len(losses),
        "steps_planned": len(batches),
        "batch": recipe.batch,
        "learning_rate": recipe.learning_rate,
        "seed": recipe.seed,
        "seconds": round(time.monotonic() - started, 1),
        "trainable": sum(p.numel() for p in trained),
        "first_loss": round(torch.stack(losses[:tenth]).mean().item(), 4),
        "last_loss": round(torch.stack(losses[-tenth:]).mean().item(), 4),
        "made_with": dict(settings.facts),
    }
    return model, record


def save_rounded(model: peft.PeftModel, folder: Path) -> None:
    """PEFT's own checkpoint, what was trained rounded to bfloat16, its lists in a fixed order."""
    folder.mkdir(parents=True, exist_ok=True)
    # False: nothing to save there, and "auto" would ask the hub
    model.save_pretrained(str(folder), save_embedding_layers=False)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    for name in tensors.keys() - VERA_PROJECTIONS:
        tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, weights, metadata={"format": "pt"})
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key, value in config.items():  # PEFT writes sets, in the order of the hash seed
        if isinstance(value, list) and all(isinstance(x, str) for x in value):
            config[key] = sorted(value)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_adapted(base: torch.nn.Module, folders: Sequence[Path], device: str) -> torch.nn.Module:
    """A float32 copy of the base with the checkpoints on it, all but the last one merged."""
    model = load_merged(base, folders[:-1], device)
    model = peft.PeftModel.from_pretrained(model, str(folders[-1])).eval()
    wrong = [name for name, x in model.named_parameters() if x.dtype != torch.float32]
    if wrong:
        raise TypeError(f"{folders[-1]}: {wrong[0]} and {len(wrong) - 1} more are not float32.")
    return model


def load_merged(base: torch.nn.Module, folders: Sequence[Path], device: str) -> torch.nn.Module:
    """A float32 copy of the base with the checkpoints merged into it, in their order."""
    model = copy.deepcopy(base).to(device)
    for folder in folders:
        model = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    return model


def answer_log_probs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """log p(target) at each answer position, [n]; logits are taken at those positions only."""
    causal = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    hidden = causal.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    logits = causal.lm_head(hidden[batch.rows, batch.columns])
    return -torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")


def score_model(model: torch.nn.Module, task: str, chat: tasks.Chat, settings: Settings) -> dict:
    """The task's score in float32 without TF32, of a model or of a model with adapters."""
    examples = tasks.read_examples(settings.data, task, "test")[: settings.test_examples]
    rows = tasks.scoring_rows(task, examples, chat)
    return tasks.score(task, examples, rows, answer_sums(model, rows, settings.device))


@torch.no_grad()
def answer_sums(model: torch.nn.Module, rows: Sequence[tasks.Row], device: str) -> np.ndarray:
    """The summed log-probability of each row's answer, [len(rows)] float64."""
    torch.set_float32_matmul_precision("highest")
    model = model.to(device).eval()
    sums = np.zeros(len(rows))
    lengths = [len(row.prompt) + len(row.answer) for row in rows]
    for indices in tasks.length_batches(lengths, SCORING_BATCH):
        batch = Batch.of([rows[i] for i in indices], device)
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have precisions of their own
            log_probs = answer_log_probs(model, batch).double()
        per_row = torch.zeros(len(indices), dtype=torch.float64, device=device)
        sums[indices] = per_row.index_add_(0, batch.rows, log_probs).cpu().numpy()
    return sums


def _chains(only: Sequence[str] | None, out: Path) -> list[list[Recipe]]:
    """The recipes to train, in chains of which each starts with one that stands on no other."""
    known = {recipe.name: recipe for recipe in recipes()}
    unknown = sorted(set(only or ()) - set(known))
    if unknown:
        raise SystemExit(f"no adapter {', '.join(unknown)}; there are: {', '.join(known)}.")
    # what stands on a retrained adapter has to be trained again
    chosen = [r for r in known.values() if not only or r.name in only or r.on in only]
    chains = {recipe.name: [recipe] for recipe in chosen if recipe.on is None}
    for recipe in chosen:
        if recipe.on is None:
            continue
        if recipe.on in chains:
            chains[recipe.on].append(recipe)
        elif (out / recipe.on / "adapter_model.safetensors").exists():
            chains[recipe.name] = [recipe]
        else:
            raise SystemExit(f"{recipe.name} stands on {recipe.on}: name that one in --only too.")
    # the longest first: the others end while it still runs
    return sorted(chains.values(), key=lambda chain: -sum(r.steps * r.batch for r in chain))


def _scaled(recipe: Recipe, factor: float) -> Recipe:
    return replace(recipe, steps=max(2, round(recipe.steps * factor)))


def _facts(model: Path, device: str) -> tuple[tuple[str, str], ...]:
    with model.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    packages = [(name, version(name)) for name in ("torch", "transformers", "peft", "gguf")]
    return (
        ("base file", model.name),
        ("sha256", digest),
        ("Python", platform.python_version()),
        *packages,
        ("device", hardware),
    )


def _read_scores(out: Path) -> dict:
    """The scores of an earlier run into the same folder, which --only replaces one by one."""
    path = out / "scores.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    return {"base": {}, "adapters": {}}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the GGUF file of the base")
    add("--data", type=Path, required=True, help="folder with the sst2 and gsm8k files")
    add("--out", type=Path, required=True, help="folder to write the adapters into")
    add("--only", nargs="+", metavar="NAME", help="train these adapters only")
    add("--archive", type=Path, help="also pack the folder --out into this .tar.gz")
    add("--jobs", type=int, help="processes (default: all adapters at once on a GPU, else 1)")
    add("--train-seconds", type=float, default=math.inf, help="at most, for each adapter's chain")
    add("--steps-scale", type=float, default=1.0, help="this part of the steps: for trials")
    add("--test-examples", type=int, help="score so many examples only: for trials")
    add("--log-every", type=int, default=50, help="steps from one line of progress to the next")
    return parser.parse_args(argv)


def _say(who: str, what: str, started: float | None) -> None:
    seconds = "" if started is None else f"  {time.monotonic() - started:.1f} s"
    print(f"[{who}] {what}{seconds}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
