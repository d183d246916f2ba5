"""What a tenant of each method costs, as a table in Markdown, of results that lie here.

    python -m benchmarks.method_table

reads `method_costs.json` (of method_costs.py) and `method_pool.json` (of method_pool.py), and
writes `METHODS.md`.
"""

import argparse
import json
from pathlib import Path

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
    parser.add_argument("--out", type=Path, default=HERE / "METHODS.md")
    args = parser.parse_args()
    args.out.write_text(table(*(json.loads(p.read_text()) for p in (args.costs, args.errors))))


def table(costs: dict, errors: dict) -> str:
    """The Markdown of both results; a method has a line if it is in one of them."""
    of_costs, of_errors = (
        {row["method"]: row for row in part["methods"]} for part in (costs, errors)
    )
    methods = list(of_errors | of_costs)
    lines = [_line(name, of_costs.get(name), of_errors.get(name)) for name in methods]
    facts, machine = errors["facts"], costs["machine"]
    return f"""# What a tenant of each method costs

Bytes: of all layers of Llama-3.1-8B in bfloat16. Microseconds: of a token in a layer, which its
adapter adds to the base, in a step of one token for each tenant; all tenants of a line have its
method, the pools have one of every method, and as many LoRAs. Predicted by the byte model, which
fits nothing, and measured on {machine["name"]}, jax {costs["jax"]} (`benchmarks.method_costs`).
bfloat16 error: of the log-probabilities against PEFT in float32, as a share of what the adapter
does; SmolLM2-135M, {facts["layers"]} layers, all methods in one batch, on {facts["device"]}
(`benchmarks.method_pool`). An empty cell was not measured.

{_cells(TITLES)}
{_cells(["---"] * len(TITLES))}
{chr(10).join(lines)}
"""


def _line(name: str, cost: dict | None, error: dict | None) -> str:
    cells = [name, "", "", "", "", ""]
    if cost is not None:
        if cost["bytes_per_tenant"]:  # of a pool every tenant has its own
            cells[1:3] = f"{cost['bytes_per_tenant']:,}", ", ".join(cost["live"]) or "-"
        times = (cost[key] / cost["tenants"] for key in ("predicted_us", "measured_us"))
        cells[3:5] = (f"{us:.2f}" for us in times)
    if error is not None:
        cells[5] = f"{100 * error['share']:.2f} %"
    return _cells(cells)


def _cells(cells) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
