"""What a tenant of each method costs, as a table in Markdown, of results that lie here.

    python -m benchmarks.method_table

reads `method_costs.json` (of method_costs.py), `method_pool.json` (of method_pool.py) and
`method_shapes.json` (of method_shapes.py), and writes `METHODS.md`. Of a method that was not timed,
the shapes tell what the byte model says.
"""

import argparse
import json
from pathlib import Path

from benchmarks.method_costs import LAYERS, TENANTS, predicted_us
from scute_jax.byte_model import Machine

HERE = Path(__file__).parent
TITLES = (
    "method",
    "bytes a tenant",
    "live slots",
    "predicted us",
    "measured us",
    "bfloat16 error",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--costs", type=Path, default=HERE / "method_costs.json")
    parser.add_argument("--errors", type=Path, default=HERE / "method_pool.json")
    parser.add_argument("--shapes", type=Path, default=HERE / "method_shapes.json")
    parser.add_argument("--out", type=Path, default=HERE / "METHODS.md")
    args = parser.parse_args()
    files = args.costs, args.errors, args.shapes
    args.out.write_text(table(*(json.loads(file.read_text()) for file in files)))


def table(costs: dict, errors: dict, shapes: dict) -> str:
    """The Markdown of the results; a method has a line if it is in one of them."""
    of_costs, of_errors = (
        {row["method"]: row for row in part["methods"]} for part in (costs, errors)
    )
    machine = Machine(**costs["machine"])
    of_costs |= {
        name: _not_timed(shape, machine) for name, shape in shapes.items() if name not in of_costs
    }
    methods = list(of_errors | of_costs)
    lines = [_line(name, of_costs.get(name), of_errors.get(name)) for name in methods]
    facts = errors["facts"]
    return f"""# What a tenant of each method costs

Bytes: of all layers of Llama-3.1-8B in bfloat16. Microseconds: of a token in a layer, which its
adapter adds to the base, in a step of one token for each tenant; all tenants of a line have its
method, the pools have one of every method, and as many LoRAs. Predicted by the byte model, which
fits nothing, and measured on {machine.name}, jax {costs["jax"]}, where copies ran at
{machine.bandwidth / 1e12:.2f} TB/s (`benchmarks.method_costs`).
bfloat16 error: of the log-probabilities against PEFT in float32, as a share of what the adapter
does; SmolLM2-135M, {facts["layers"]} layers, all methods in one batch, on {facts["device"]}
(`benchmarks.method_pool`). An empty cell was not measured: KaSA, TinyLoRA and PSOFT are terms of
their rank once they are loaded, as LoRA is.

Methods without a line cost what another does: aLoRA and Poly what LoRA of their rank, Bone what
MiSS, SSF what GLoRA without its term (s and b), replaced and added tokens what the cost table in
the README says of rows.

{_cells(TITLES)}
{_cells(["---"] * len(TITLES))}
{chr(10).join(lines)}
"""


def _line(name: str, cost: dict | None, error: dict | None) -> str:
    cells = [name, "", "", "", "", ""]
    if cost is not None:
        if cost["bytes_per_tenant"]:  # of a pool every tenant has its own
            cells[1:3] = f"{cost['bytes_per_tenant']:,}", ", ".join(cost["live"]) or "-"
        for place, key in ((3, "predicted_us"), (4, "measured_us")):
            if key in cost:
                cells[place] = f"{cost[key] / cost['tenants']:.2f}"
    if error is not None:
        cells[5] = f"{100 * error['share']:.2f} %"
    return _cells(cells)


def _not_timed(shape: dict, machine: Machine) -> dict:
    """The line of `method_costs.json` for a method, without what was measured."""
    return {
        "tenants": TENANTS,
        "live": shape["live"],
        "bytes_per_tenant": LAYERS * shape["bytes"] + shape["elsewhere"],
        "predicted_us": predicted_us([shape] * TENANTS, machine),
    }


def _cells(cells) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
