"""From the start of a process to the first token of a request.

    python -m benchmarks.engine_cold --compiled FOLDER [--layers N] [--tiny]

prints seconds as JSON: in all, and those in which the weights are made (they are random here; a
server loads them).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def seconds(layers: int, tiny: bool) -> tuple[float, str]:
    """Seconds without those of the weights, once another process has compiled all; and a note."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.engine_cold", "--compiled", folder]
        command += ["--layers", str(layers), *(["--tiny"] if tiny else [])]
        first, second = (_run(command) for _ in range(2))
    note = f"all {second['all']:.1f} s, weights {second['weights']:.1f} s; without a cache "
    return second["all"] - second["weights"], note + f"{first['all'] - first['weights']:.1f} s"


def _run(command: list[str]) -> dict[str, float]:
    began = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    times = json.loads(done.stdout.strip().rpartition("\n")[2])
    return {"all": times["first_token"] - began, "weights": times["weights"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    import jax

    from benchmarks.engine_steps import request
    from benchmarks.llama_8b import adapter, config, random_params
    from scute_jax.serving import Engine, EngineOptions

    shape = config(args.layers, args.tiny)
    jax.devices()  # the device starts in time that counts
    began = time.time()
    params = jax.block_until_ready(random_params(shape))
    weights = time.time() - began
    memory = (64 if args.tiny else 8192) << 20
    options = EngineOptions.defaults(memory=memory, compilation_cache=args.compiled)
    engine = Engine(shape, params, None, options)
    engine.add_adapter("lora", adapter(shape, "LORA", 0))
    next(chunk for chunk in engine.stream([request(shape, "lora", 8, 64)]) if chunk.token_ids)
    print(json.dumps({"first_token": time.time(), "weights": weights}), flush=True)
    os._exit(0)  # the rest of the text is of no interest


if __name__ == "__main__":
    main()
