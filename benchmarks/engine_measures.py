"""What is measured of an engine at the shapes of Llama-3.1-8B, and what each figure should be."""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

from benchmarks import engine_load
from benchmarks.engine_steps import Steps
from benchmarks.llama_8b import adapter, config, projections, random_params
from scute_jax.calibrate import copy_bandwidth, median_us
from scute_jax.serving import EngineOptions

BEGAN = time.perf_counter()
MATRIX_FLOPS = 790e12  # of an H200 in bfloat16, measured
VLLM_MS = {"base": 5.74, "lora16": 13.25, "lora64": 18.95, "lora256": 48.2}  # 64 rows
VLLM_MS_16 = 5.02
KEYS, PROMPT, TOKENS = 256, 8, 128
CHAIN = 16  # blocks of a prompt in the long prefill
POOLS = {  # name -> (method, rank, how many tenants)
    "base": (),
    "lora16": (("LORA", 16, 16),),
    "lora64": (("LORA", 64, 16),),
    "lora256": (("LORA", 256, 16),),
    "lora20": (("LORA", 16, 20),),
    "five": tuple((m, 16, 4) for m in ("LORA", "DORA", "IA3", "VERA", "OFT")),
    "four": tuple((m, 16, 5) for m in ("LORA", "DORA", "IA3", "OFT")),
    "vera16": (("VERA", 16, 16),),
    "vera1": (("VERA", 16, 1),),
}


@dataclass(frozen=True)
class Result:
    """One figure; `target` says what it should be, as far as there is a target."""

    name: str
    value: float
    unit: str
    target: str = ""
    note: str = ""

    @property
    def met(self) -> str:
        if not self.target:
            return ""
        sign, bound = self.target.split()
        better = self.value <= float(bound) if sign == "<=" else self.value >= float(bound)
        return "yes" if better else "NO"

    def __str__(self) -> str:
        return (
            f"{self.name:34} {self.value:10.3f} {self.unit:8} {self.target:>9} {self.met:>4}  "
            f"{self.note}"
        )


class Lab:
    """The model, its steps with each pool of adapters, and what was measured."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.config = args, config(args.layers, args.tiny)
        size = 4 if args.tiny else 2048
        self.copy, self.read = copy_bandwidth(size << 20), read_bandwidth(size << 20)
        self.params = random_params(self.config)
        self.rows = 8 if args.tiny else 64
        self.blocks = self.rows // 4, self.rows, 2 * self.rows
        self.options = EngineOptions(
            memory=args.cache_mib << 20,
            block=16 if args.tiny else args.block,
            prefill_blocks=self.blocks,
            decode_rows=(self.rows // 4, self.rows),
            steps=16,
            ahead=1,
        )
        self._steps: dict[str, Steps] = {}
        self._seconds: dict[tuple[str, int], float] = {}

    def steps(self, pool: str) -> Steps:
        """The steps with a pool of adapters on the device."""
        if pool not in self._steps:
            began, parts = time.perf_counter(), POOLS[pool]
            adapters = [
                adapter(self.config, method, tenant, rank)
                for method, rank, count in parts
                for tenant in range(count)
            ]
            given = asdict(self.options) | {"max_adapters": max(1, len(adapters))}
            steps = Steps(self.config, self.params, adapters, EngineOptions(**given))
            self._steps[pool] = steps
            say(f"{pool}: {steps.pool_bytes:,} bytes, made in {time.perf_counter() - began:.1f} s")
        return self._steps[pool]

    def keep(self, pools: set[str]) -> None:
        """Lets the other pools go."""
        self._steps = {pool: steps for pool, steps in self._steps.items() if pool in pools}

    def decode(self, pool: str, rows: int = 0) -> float:
        """Milliseconds of a decode step."""
        key = pool, rows or self.rows
        if key not in self._seconds:
            self._seconds[key] = self.steps(pool).decode_seconds(key[1], KEYS)
        return 1e3 * self._seconds[key]

    def prefill(self, pool: str) -> float:
        """Milliseconds of a prefill call of a block for each row."""
        steps = self.steps(pool)
        return 1e3 * steps.prefill_seconds(steps.prefill_plan(self.rows))

    def step_ms(self, rows: int) -> float:
        """Milliseconds in which the bytes of a base decode step can be read."""
        layers, head = self.params.layers, self.params.linear("lm_head")
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves((layers, self.params.norm, head)))
        c = self.config
        per_key = 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
        return 1e3 * (weights + rows * KEYS * per_key) / self.read


def read_bandwidth(size: int) -> float:
    """Bytes per second at which a sum of `size` bytes of bfloat16 reads them."""
    x, sums = jnp.ones((size // 8192, 4096), jnp.bfloat16), 8

    def chain(x):
        total = jnp.float32(0)
        for _ in range(sums):  # each starts from the whole of the one before
            total = jax.lax.optimization_barrier(jnp.sum(x.astype(jnp.float32) + 1e-9 * total))
        return total

    us, _ = median_us(jax.jit(chain), x, per_call=sums)
    return size / (us * 1e-6)


def decode(lab: Lab) -> Iterator[Result]:
    for rows in (lab.rows, lab.rows // 4):
        ms, least = lab.decode("base", rows), lab.step_ms(rows)
        yield Result(f"base decode, {rows} rows", ms, "ms/step", note=f"bytes {least:.2f} ms")
        yield Result(f"base decode, {rows} rows, over bytes", ms / least, "x", "<= 1.15")


def lora(lab: Lab, rank: int) -> Iterator[Result]:
    pool, base = f"lora{rank}", lab.decode("base")
    ms, factors = lab.decode(pool), 1e3 * lab.steps(pool).pool_bytes / lab.read
    note = f"bytes {lab.step_ms(lab.rows) + factors:.2f} ms"
    yield Result(f"16 LoRA r{rank} decode", ms, "ms/step", note=note)
    target = "<= 1.12" if rank == 16 else ""
    yield Result(f"16 LoRA r{rank} decode, over base", ms / base, "x", target)


def pools(lab: Lab, name: str, target: str) -> Iterator[Result]:
    for what, ms in (("decode", lab.decode), ("prefill", lab.prefill)):
        own, plain = ms(name), ms("lora20")
        note = f"{own:.2f} over {plain:.2f} ms"
        yield Result(f"{name} methods over LoRA, {what}", own / plain, "x", target, note)


def vera(lab: Lab) -> Iterator[Result]:
    many, one = lab.decode("vera16"), lab.decode("vera1")
    note = f"{many:.3f} over {one:.3f} ms"
    yield Result("16 VeRA tenants over 1, decode", many / one, "x", "<= 1.02", note)


def prefill(lab: Lab) -> Iterator[Result]:
    steps, blocks = lab.steps("base"), lab.blocks[-1]
    tokens, length = blocks * lab.options.block, CHAIN * lab.options.block
    seconds = steps.prefill_seconds(steps.prefill_plan(blocks, chain=CHAIN))
    c = lab.config
    weights = sum(d_in * d_out for d_in, d_out in projections(c).values())
    attention = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * length
    head = blocks * c.hidden_size * c.vocab_size
    flops = tokens * (2 * weights + attention) + 2 * head
    note = f"{tokens} tokens in prompts of {length}: {1e3 * seconds:.1f} ms"
    share = 100 * flops / seconds / MATRIX_FLOPS
    yield Result("base prefill, of 790 TFLOP/s", share, "%", ">= 60", note)


def engine(lab: Lab, pool: str, rows: int = 0) -> Iterator[Result]:
    rows, steps = rows or lab.rows, lab.steps(pool)
    whole = steps.generate_seconds(rows, PROMPT, TOKENS)
    alone = steps.text_seconds(rows, PROMPT, TOKENS)
    first = steps.generate_seconds(rows, PROMPT, 1)
    ms, name = 1e3 * whole / TOKENS, f"engine, {pool}, {rows} rows"
    vllm = VLLM_MS_16 if rows < lab.rows else VLLM_MS[pool]
    goal = {"base": 1.0, "lora16": 2.1, "lora64": 2.5, "lora256": 4.0}[pool]
    note = f"{rows * TOKENS / whole:.0f} tokens/s; first token after {1e3 * first:.0f} ms"
    yield Result(f"{name}, wall", ms, "ms/step", note=note)
    later = 1e3 * (whole - first) / (TOKENS - 1)
    yield Result(f"{name}, wall after the first token", later, "ms/step")
    note = f"vLLM {vllm} ms"
    yield Result(f"{name}, over vLLM", vllm / ms, "x", f">= {goal}", note)
    share = 100 * (1 - alone / whole)
    note = f"steps alone {1e3 * alone:.0f} of {1e3 * whole:.0f} ms"
    yield Result(f"{name}, not in steps", share, "%", "<= 3", note)


def load(lab: Lab) -> Iterator[Result]:
    for method, stall in engine_load.stalls(lab.config, lab.params, lab.options).items():
        note = f"host {stall.host_ms:.1f} ms; step {stall.step_ms:.2f} ms; worst {stall.worst:.1f}"
        yield Result(f"load of one {method} tenant", stall.steps, "steps", "<= 1", note)


Programs = tuple[tuple[str, str, int], ...]  # pool, "decode" or "prefill", rows or blocks


def measurements(rows: int) -> dict[str, tuple]:
    """Name -> (function of a lab, programs to compile for it)."""
    base: Programs = (("base", "decode", rows),)

    def both(*names: str) -> Programs:
        return tuple((name, kind, rows) for name in names for kind in ("decode", "prefill"))

    loras = {}
    for rank in (16, 64, 256):
        name = f"lora{rank}"
        loras[name] = (lambda lab, r=rank: lora(lab, r), (*base, (name, "decode", rows)))
        loras[f"engine-{name}"] = (lambda lab, n=name: engine(lab, n), both(name))
    few = rows // 4
    return {
        "decode": (decode, (*base, ("base", "decode", few))),
        "prefill": (prefill, (("base", "prefill", 2 * rows),)),
        "engine-base": (lambda lab: engine(lab, "base"), both("base")),
        "engine-base-16": (
            lambda lab: engine(lab, "base", few),
            (("base", "decode", few), ("base", "prefill", few)),
        ),
        **loras,
        "five": (lambda lab: pools(lab, "five", "<= 1.05"), both("five", "lora20")),
        "four": (lambda lab: pools(lab, "four", "<= 1.02"), both("four", "lora20")),
        "vera": (vera, tuple((name, "decode", rows) for name in ("vera16", "vera1"))),
        "load": (load, ()),
    }


def say(what: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}] {what}", flush=True)
