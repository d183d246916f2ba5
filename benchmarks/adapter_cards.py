"""What is written about trained adapters: a card each, an index of all, and scores.json.

    {"base": {task: score}, "adapters": {name: record}}  ->  write_results

A record is what `benchmarks.train_adapters` knows of an adapter: task, method, stack, steps, batch,
learning_rate, seed, losses, trainable, bytes, made_with, and its score (`adapter_tasks.score`).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import adapter_tasks as tasks

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ABOUT_TASK = {
    "sst2": "SST-2, the sentiment of movie review sentences (67,349 to train, 872 to test: dev)",
    "gsm8k": "GSM8K, grade school mathematics (7,473 questions to train, 1,319 to test), "
    "answers without the <<...>> notes",
}
ABOUT_PROMPT = {
    "sst2": "asks for the sentiment, the answer is `positive` or `negative`",
    "gsm8k": "is the question, the answer is the worked solution",
}
SHOWN_CONFIG = {  # the fields of PEFT's configs that a card shows
    "LORA": ("r", "lora_alpha"),
    "IA3": ("feedforward_modules",),
    "VERA": ("r", "projection_prng_key", "save_projection"),
    "OFT": ("oft_block_size", "use_cayley_neumann", "num_cayley_neumann_terms"),
}


def write_results(scores: dict, order: Sequence[str], out: Path) -> str:
    """The text of the index; writes scores.json, the index and every card into the folder."""
    records = {name: scores["adapters"][name] for name in order if name in scores["adapters"]}
    # one line an adapter: lists of numbers are not for reading, and the differences stay small
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(x)}" for name, x in records.items())
    text = f'{{"base": {json.dumps(scores["base"])},\n"adapters": {{\n{lines}\n}}}}\n'
    (out / "scores.json").write_text(text, encoding="utf-8")
    for name, record in records.items():
        config = json.loads((out / name / "adapter_config.json").read_text(encoding="utf-8"))
        card = _card(name, record, config, scores["base"][record["task"]])
        (out / name / "README.md").write_text(card, encoding="utf-8")
    index = _index(records, scores["base"])
    (out / "README.md").write_text(index, encoding="utf-8")
    return index


def _card(name: str, record: dict, config: dict, base_score: dict) -> str:
    made_with = dict(record["made_with"])
    base_file, digest = made_with.pop("base file"), made_with.pop("sha256")
    fields = (*SHOWN_CONFIG[config["peft_type"]], "target_modules")
    shown = [f"{x} {json.dumps(config[x])}" for x in fields]
    cut = "" if record["steps"] == record["steps_planned"] else " (stopped by time)"
    projections = " (the random projections float32)" if config.get("save_projection") else ""
    rows = {
        "method": f"{record['method']}: {', '.join(shown)}",
        "data": ABOUT_TASK[record["task"]],
        "prompt": f"the model's chat template; the user message {ABOUT_PROMPT[record['task']]}",
        "training": f"{record['steps']} steps{cut} of {record['batch']} examples, loss on the "
        f"answer's tokens (with the one that ends the turn), AdamW, learning rate "
        f"{record['learning_rate']:g} (warm-up, then linear to 0), seed {record['seed']}",
        "loss": f"{record['first_loss']:.4f} over the first tenth of the steps, "
        f"{record['last_loss']:.4f} over the last",
        "parameters trained": f"{record['trainable']:,}",
        "weights": f"{record['bytes']:,} bytes, bfloat16{projections}",
        "score in PEFT": f"{tasks.headline(record['score'])} over "
        f"{record['score']['examples']:,} test examples (these weights, in float32)",
        "score of the base": tasks.headline(base_score),
        "base weights": f"{base_file}, dequantised (sha256 {digest})",
        "made with": ", ".join(f"{key} {value}" for key, value in made_with.items()),
    }
    if "score_alone" in record:
        below = record["stack"][0]
        rows["stack"] = (
            f"trained on the base with [{below}](../{below}) merged in: ask for "
            f"`{json.dumps(record['stack'])}`, whose score is the one above; without {below} it is "
            f"{tasks.headline(record['score_alone'])}"
        )
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    command = (
        f"python -m benchmarks.train_adapters --model {base_file} --data DATA --out OUT "
        f"--only {' '.join(record['stack'])}"
    )
    return (
        f"---\nbase_model: {BASE_MODEL}\nlibrary_name: peft\n---\n\n# {name}\n\n"
        f"| | |\n| --- | --- |\n{table}\n\nMade by:\n\n    {command}\n"
    )


def _index(records: dict[str, dict], base_scores: dict) -> str:
    rows = [
        f"| [{name}]({name}) | {record['method']} | {record['task']} | "
        f"{tasks.headline(record['score'])} | {tasks.headline(base_scores[record['task']])} | "
        f"{record['trainable']:,} | {record['bytes']:,} |"
        for name, record in records.items()
    ]
    return (
        f"# Adapters of {BASE_MODEL}\n\n"
        "Trained with the PEFT library by `benchmarks/train_adapters.py`. A score is that of the "
        "files here in PEFT, in float32 on the\ndequantised Q4_1 base; `scores.json` holds it for "
        "every test example (prompts: `benchmarks/adapter_tasks.py`).\nThe score of an adapter "
        "`...-on-...` is that of the stack of the two.\n\n"
        "| adapter | method | task | score | base | parameters | bytes |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )
