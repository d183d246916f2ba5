"""The two tasks of the demo adapters: data, prompts, and what a score means.

Whoever computes the log-probabilities (PEFT in torch, or scute_jax) takes the rows and the scores
from here, so that the two can be compared number by number:

    read_examples -> scoring_rows -> (log-probabilities of the answers) -> score

Only numpy is needed. The data folder holds `sst2_{train,dev}.tsv` (header `sentence<TAB>label`,
1 = positive) and `gsm8k_{train,test}.jsonl` (fields `question` and `answer`).
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TASKS = ("sst2", "gsm8k")
SST2_LABELS = ("negative", "positive")  # by the label of the file, 0 and 1
SST2_QUESTION = "Is the sentiment of this movie review positive or negative?\n\n{sentence}"
CALCULATOR_NOTE = re.compile(
    r"<<[^>]*>>"
)  # "48/2 = <<48/2=24>>24": an aid of the data set, not text
FILES = {
    ("sst2", "train"): "sst2_train.tsv",
    ("sst2", "test"): "sst2_dev.tsv",  # the labels of the official test set are not public
    ("gsm8k", "train"): "gsm8k_train.jsonl",
    ("gsm8k", "test"): "gsm8k_test.jsonl",
}


@dataclass(frozen=True)
class Example:
    """One user message and the assistant's answer to it."""

    user: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.user}]


@dataclass(frozen=True)
class Row:
    """Token ids of a prompt and of the answer whose log-likelihood is asked for.

    The two are tokenised apart, so the answer's ids do not depend on who joins them.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Chat:
    """The tokenizer of a chat model as three facts.

    `render` gives the prompt text of messages, the default system message and the header of the
    assistant's turn included; `tokenize` adds no token of its own; `end_id` ends the turn.
    """

    render: Callable[[list[dict[str, str]]], str]
    tokenize: Callable[[str], list[int]]
    end_id: int


def read_examples(data: Path, task: str, split: str) -> list[Example]:
    """The examples of ("sst2" | "gsm8k", "train" | "test") in the order of the file."""
    if (task, split) not in FILES:
        known = ", ".join(f"{t}/{s}" for t, s in FILES)
        raise ValueError(f"no data for {task}/{split}; known: {known}.")
    # not splitlines(): a sentence may hold one of the rarer line separators of Unicode
    lines = (data / FILES[task, split]).read_text(encoding="utf-8").rstrip("\n").split("\n")
    if task == "sst2":
        return [_sst2_example(line) for line in lines[1:]]
    return [_gsm8k_example(json.loads(line)) for line in lines]


def training_row(example: Example, chat: Chat) -> Row:
    """Prompt and answer with the token that ends the turn: the loss is on the answer's ids only."""
    answer = (*chat.tokenize(example.answer), chat.end_id)
    return Row(tuple(chat.tokenize(chat.render(example.messages))), answer)


def training_batches(
    examples: Sequence[Example], chat: Chat, steps: int, batch: int, seed: int
) -> list[list[Row]]:
    """A batch of rows for each step, in an order drawn from the seed; rows of like length together.

    The examples come in a random order, again and again; 16 batches at a time are sorted by
    length, cut and shuffled, which saves most of the padding.
    """
    rng = np.random.default_rng(seed)
    needed = steps * batch
    rounds = -(-needed // len(examples))
    order = np.concatenate([rng.permutation(len(examples)) for _ in range(rounds)])[:needed]
    encoded = {int(i): training_row(examples[i], chat) for i in np.unique(order)}
    rows = [encoded[int(i)] for i in order]
    batches = []
    for start in range(0, needed, 16 * batch):
        part = rows[start : start + 16 * batch]
        cut = length_batches([len(row.prompt) + len(row.answer) for row in part], batch)
        batches += [[part[i] for i in cut[j]] for j in rng.permutation(len(cut))]
    return batches


def scoring_rows(task: str, examples: Sequence[Example], chat: Chat) -> list[Row]:
    """The rows whose answers' log-likelihoods `score` needs, in its order.

    gsm8k: one row an example, as in training. sst2: two rows a sentence, the answers "negative"
    and "positive" without the token that ends the turn.
    """
    if task == "gsm8k":
        return [training_row(example, chat) for example in examples]
    rows = []
    for example in examples:
        prompt = tuple(chat.tokenize(chat.render(example.messages)))
        rows += [Row(prompt, tuple(chat.tokenize(label))) for label in SST2_LABELS]
    return rows


def score(task: str, examples: Sequence[Example], rows: Sequence[Row], sums: np.ndarray) -> dict:
    """The score as a dict for JSON; `sums[i]` is the summed log-probability of rows[i].answer.

    sst2: `accuracy` in percent of the sentences whose margin, log p("positive") -
    log p("negative"), has the sign of the label, and the `margins`.
    gsm8k: `log_likelihood_per_token` (over all answer tokens of the test set; the headline),
    `log_likelihood_per_answer` (mean of the sums), and the sums as `log_likelihoods`.
    Units: natural logarithm.
    """
    sums = np.asarray(sums, np.float64)
    if sums.shape != (len(rows),):
        raise ValueError(f"{task}: {len(rows)} rows need as many sums, not shape {sums.shape}.")
    if task == "gsm8k":
        tokens = sum(len(row.answer) for row in rows)
        return {
            "task": task,
            "examples": len(examples),
            "log_likelihood_per_token": float(sums.sum() / tokens),
            "log_likelihood_per_answer": float(sums.mean()),
            "log_likelihoods": [round(float(x), 4) for x in sums],
        }
    negative, positive = sums.reshape(-1, 2).T
    margins = positive - negative
    truth = np.array([example.answer == "positive" for example in examples])
    return {
        "task": task,
        "examples": len(examples),
        "accuracy": float(100 * np.mean((margins > 0) == truth)),
        "margins": [round(float(x), 4) for x in margins],
    }


def headline(result: dict) -> str:
    """The one figure of a score, as a person reads it."""
    if result["task"] == "sst2":
        return f"{result['accuracy']:.2f} % accuracy"
    return f"{result['log_likelihood_per_token']:.4f} nats per answer token"


def length_batches(lengths: Sequence[int], size: int) -> list[np.ndarray]:
    """Indices in batches of rows of like length, longest first (so memory runs out at once)."""
    order = np.argsort(-np.asarray(lengths), kind="stable")
    return [order[i : i + size] for i in range(0, len(order), size)]


def _sst2_example(line: str) -> Example:
    sentence, label = line.rsplit("\t", 1)
    return Example(SST2_QUESTION.format(sentence=sentence.strip()), SST2_LABELS[int(label)])


def _gsm8k_example(record: dict[str, str]) -> Example:
    answer = CALCULATOR_NOTE.sub("", record["answer"]).strip()
    return Example(record["question"].strip(), answer)
