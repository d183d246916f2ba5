"""Many requests over many adapters of all methods while adapters come, change and go.

    python -m benchmarks.soak --requests 5000 --adapters 200 --resident 8 --out benchmarks/soak.json

A tiny base, an engine with room for few adapters and few pages, and random requests: lengths,
sampling, stacks, scales, shared prefixes, stop strings. Between the steps requests are cancelled,
adapters replaced under their name, removed, and added under new names. Then every completed request
is run alone in another engine under the weights that its name had when it was submitted: the texts
have to be equal (of a cancelled request, its beginning). Counted besides: what compiled after the
warm-up, and the pages and slots that are not given back.
"""

import argparse
import json
import platform
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np
import peft

from benchmarks.soak_tenants import ALORA, CALL, RECIPES, write_adapter, write_base
from scute_jax.serving import Completion, Engine, Request, SamplingParams

IN_FLIGHT = 40  # requests in the engine at a time
SCALABLE = ("lora", "dora", "ia3-out", "vera", "oft", "hra", "loha", "beft", "fourierft")
SECOND = ("lora", "ia3-out")  # what is stacked on others


@dataclass(frozen=True)
class Shape:
    """How large the soak is."""

    requests: int = 5000
    adapters: int = 200
    spare: int = 40  # checkpoints that replace others or come later
    resident: int = 8
    layers: int = 2
    pages: int = 32  # of 16 tokens: too few for all rows, so that sequences are preempted
    rows: int = 8
    recipes: tuple[str, ...] = tuple(RECIPES)
    seed: int = 0


@dataclass
class Outcome:
    """What happened. `wrong` names the requests whose text is another than alone."""

    completed: int = 0
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    replaced: int = 0
    added: int = 0
    removed: int = 0
    loads: int = 0
    preemptions: int = 0
    tokens: int = 0
    compared_with_base: int = 0  # requests with an adapter, every tenth, that were run without it
    other_than_base: int = 0  # those of them whose text is another then
    compilations_of_warm_up: int = 0
    compilations_after_warm_up: int = 0
    pages_leaked: int = 0
    slots_leaked: int = 0
    methods: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Soak:
    """The engine under load, and what each name means at the moment."""

    def __init__(self, shape: Shape, folder: Path):
        self.shape, self.rng, self.out = shape, np.random.default_rng(shape.seed), Outcome()
        began = time.monotonic()
        base = write_base(folder / "base", shape.layers)
        self.folder, recipes = folder, shape.recipes
        self.checkpoints = [
            write_adapter(
                base, recipes[i % len(recipes)], folder / f"{i}-{recipes[i % len(recipes)]}", i
            )
            for i in range(shape.adapters + shape.spare)
        ]
        self.engine = self._new_engine()
        self.meaning: dict[str, Path] = {}
        for i, path in enumerate(self.checkpoints[: shape.adapters]):
            self._add(f"tenant-{i}", path)
        self.out.seconds["set up"] = time.monotonic() - began
        self.prefixes = [self._tokens(48) for _ in range(4)]
        self.asked: dict[str, Request] = {}  # with folders in place of names
        self.done: dict[str, Completion] = {}

    def _new_engine(self) -> Engine:
        shape = self.shape
        return Engine.from_pretrained(
            self.folder / "base",
            dtype="float32",
            max_adapters=shape.resident,
            memory=shape.pages * 16 * shape.layers * 2 * 2 * 12 * 4,
            prefill_blocks=(4,),
            decode_rows=(shape.rows,),
        )

    def run(self, progress) -> Outcome:
        """Everything, in order."""
        began = time.monotonic()
        self._warm_up(self.engine, self.meaning, progress)
        self.out.compilations_of_warm_up = self.engine.stats().compilations
        self.out.seconds["warm up"] = time.monotonic() - began
        began = time.monotonic()
        self._load(progress)
        self.out.seconds["load"] = time.monotonic() - began
        self._count()
        began = time.monotonic()
        self._check(progress)
        self.out.seconds["each alone"] = time.monotonic() - began
        return self.out

    def _warm_up(self, engine: Engine, meaning: dict[str, Path], progress) -> None:
        """Compiles all steps, those for a stack of each method under each second one included."""
        first: dict[str, str] = {}
        for name, path in meaning.items():
            first.setdefault(_recipe(path), name)
        engine.warm_up(
            lambda done, total, what: progress(f"warm-up {done}/{total}: {what}"),
            [
                (name, first[second])
                for recipe, name in first.items()
                for second in SECOND
                if recipe != ALORA  # does not stack
            ],
        )

    def _load(self, progress) -> None:
        """Submits, cancels, loads and replaces between the steps until all requests have ended."""
        open_tickets, submitted = {}, 0
        while submitted < self.shape.requests or open_tickets:
            burst = int(self.rng.integers(0, 12))
            room = min(IN_FLIGHT - len(open_tickets), self.shape.requests - submitted, burst)
            for _ in range(room):
                request = self._request(f"r{submitted}")
                open_tickets[request.id] = self.engine.submit(request)
                submitted += 1
            if open_tickets and self.rng.random() < 0.06:
                name = str(self.rng.choice(sorted(open_tickets)))
                self.engine.cancel(open_tickets[name])
            if self.rng.random() < 0.1:
                self._change()
            self.engine.step()
            for name, ticket in list(open_tickets.items()):
                chunk = ticket.sink.take()
                if chunk is not None and chunk.completion is not None:
                    self.done[name] = chunk.completion
                    del open_tickets[name]
                    if len(self.done) % 250 == 0:
                        progress(f"{len(self.done)} of {self.shape.requests} requests have ended")

    def _change(self) -> None:
        """Replaces, adds or removes an adapter."""
        names, what = sorted(self.meaning), self.rng.random()
        path = self.checkpoints[int(self.rng.integers(len(self.checkpoints)))]
        if what < 0.5:
            self._add(str(self.rng.choice(names)), path)
            self.out.replaced += 1
        elif what < 0.75 or len(names) < self.shape.adapters // 2:
            self._add(f"late-{self.out.added}", path)
            self.out.added += 1
        else:
            self._remove(str(self.rng.choice(names)))
            self.out.removed += 1

    def _add(self, name: str, path: Path) -> None:
        self.engine.add_adapter(name, path)
        self.meaning[name] = path

    def _remove(self, name: str) -> None:
        self.engine.remove_adapter(name)
        del self.meaning[name]

    def _request(self, name: str) -> Request:
        """A random request; few adapters are asked for often, most seldom."""
        rng = self.rng
        prompt = self._tokens(int(rng.integers(1, 70)))
        if rng.random() < 0.3:
            prompt = self.prefixes[int(rng.integers(4))] + prompt[:20]
        if rng.random() < 0.25:
            place = int(rng.integers(len(prompt) + 1))
            prompt = prompt[:place] + CALL + prompt[place:]
        greedy = rng.random() < 0.5
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 60)),
            temperature=0.0 if greedy else float(rng.uniform(0.3, 1.5)),
            top_p=1.0 if greedy else float(rng.uniform(0.5, 1.0)),
            top_k=0 if greedy else int(rng.integers(0, 30)),
            seed=int(rng.integers(2**31)),
            stop=("e",) if rng.random() < 0.1 else (),
            ignore_eos=bool(rng.random() < 0.5),
            logprobs=3 if rng.random() < 0.1 else None,
            prompt_logprobs=0 if rng.random() < 0.05 else None,
        )
        adapters, scale = self._adapters()
        request = Request(prompt_token_ids=prompt, sampling=sampling, id=name)
        if adapters:
            request = replace(request, adapter=adapters, scale=scale)
            folders = [str(self.meaning[adapter]) for adapter in adapters]
            self.asked[name] = replace(request, adapter=folders)
        else:
            self.asked[name] = request
        return request

    def _adapters(self) -> tuple[list[str], float]:
        rng, names = self.rng, list(self.meaning)
        if rng.random() < 0.08:
            return [], 1.0
        first = names[int(len(names) * rng.random() ** 3)]
        recipe = _recipe(self.meaning[first])
        if recipe != ALORA and rng.random() < 0.05:
            second = [n for n in names if _recipe(self.meaning[n]) in SECOND]
            return [first, second[int(rng.integers(len(second)))]], 1.0
        if recipe in SCALABLE and rng.random() < 0.1:
            return [first], float(rng.choice([0.0, 0.5, 1.5]))
        return [first], 1.0

    def _tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, 95, count).tolist()

    def _count(self) -> None:
        """What is left behind once nothing runs, and once no adapter has a name."""
        out, stats = self.out, self.engine.stats()
        out.compilations_after_warm_up = stats.compilations - out.compilations_of_warm_up
        out.preemptions, out.loads = stats.preemptions, stats.loads
        out.pages_leaked = stats.pages_used
        for name in list(self.meaning):
            self._remove(name)
        out.slots_leaked = self.engine.stats().slots_used

    def _check(self, progress) -> None:
        """Runs every request alone, under the weights that its names meant."""
        alone = self._new_engine()
        for i, path in enumerate(self.checkpoints):
            if i == self.shape.adapters:
                meaning = {str(p): p for p in self.checkpoints[:i]}
                self._warm_up(alone, meaning, lambda line: None)  # the steps of the other engine
            alone.add_adapter(str(path), path)
        methods: Counter[str] = Counter()
        for count, (name, request) in enumerate(self.asked.items(), 1):
            completion = self.done[name]
            (expected,) = alone.generate([request])
            if completion.error is not None or expected.error is not None:
                self.out.errors.append(f"{name}: {completion.error} / alone: {expected.error}")
                continue
            whole = completion.finish_reason != "cancelled"
            self.out.completed += whole
            self.out.cancelled += not whole
            self.out.tokens += len(completion.token_ids)
            begun = len(completion.token_ids)
            same = completion.token_ids == expected.token_ids[: None if whole else begun]
            if not same or (whole and completion.text != expected.text):
                self.out.wrong.append(f"{name}: {completion} / alone: {expected}")
            if request.adapter_names and request.scale != 0 and count % 10 == 0:
                (plain,) = alone.generate([replace(request, adapter=None, scale=1.0)])
                self.out.compared_with_base += 1
                self.out.other_than_base += plain.token_ids != expected.token_ids
            methods[" + ".join(_recipe(Path(f)) for f in request.adapter_names)] += 1
            if count % 250 == 0:
                progress(f"{count} of {len(self.asked)} requests were run alone")
        singles = {method: n for method, n in methods.items() if " + " not in method}
        self.out.methods = {"base": singles.pop("", 0), **dict(sorted(singles.items()))}
        self.out.methods["stacks"] = sum(n for m, n in methods.items() if " + " in m)


def _recipe(path: Path) -> str:
    return path.name.partition("-")[2]


def soak(shape: Shape, progress=lambda line: None) -> Outcome:
    """Runs it in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return Soak(shape, Path(folder)).run(progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("requests", "adapters", "resident", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape, name))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = Shape(args.requests, args.adapters, resident=args.resident, seed=args.seed)
    outcome = soak(shape, lambda line: print(line, flush=True))
    result = {
        "command": f"python -m benchmarks.soak --requests {shape.requests} "
        f"--adapters {shape.adapters} --resident {shape.resident} --seed {shape.seed}",
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "peft": peft.__version__,
            "device": jax.devices()[0].device_kind,
        },
        "shape": {key: value for key, value in vars(shape).items() if key != "recipes"},
        "outcome": vars(outcome)
        | {"seconds": {what: round(s, 1) for what, s in outcome.seconds.items()}},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
