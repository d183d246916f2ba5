"""The table of results, from results made up here, and that of the results that lie in the repo."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import method_table

COSTS = {
    "machine": {"name": "NVIDIA H200"},
    "jax": "0.11.2",
    "methods": [
        {
            "method": "BOFT",
            "tenants": 16,
            "live": ["P", "s"],
            "bytes_per_tenant": 1234567,
            "base_us": 100.0,
            "predicted_us": 16.0,
            "measured_us": 24.4,
        },
        {
            "method": "LoRA",
            "tenants": 2,
            "live": [],
            "bytes_per_tenant": 64,
            "base_us": 90.0,
            "predicted_us": 3.0,
            "measured_us": 2.5,
        },
        {
            "method": "pool",
            "tenants": 4,
            "live": [],
            "bytes_per_tenant": 0,
            "base_us": 90.0,
            "predicted_us": 40.0,
            "measured_us": 50.0,
        },
    ],
}
ERRORS = {
    "facts": {"layers": 6, "device": "NVIDIA H200"},
    "methods": [
        {"method": "LoRA", "error": 0.02, "effect": 2.0, "share": 0.01},
        {"method": "PSOFT", "error": 0.03, "effect": 1.0, "share": 0.03},
    ],
}


def test_a_line_of_each_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = {name: tmp_path / name for name in ("costs", "errors", "out")}
    paths["costs"].write_text(json.dumps(COSTS))
    paths["errors"].write_text(json.dumps(ERRORS))
    given = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    monkeypatch.setattr(sys, "argv", ["method_table", *given])
    method_table.main()
    text = paths["out"].read_text()
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| method | bytes a tenant | live slots | predicted us | measured us | bfloat16 error |",
        "| --- | --- | --- | --- | --- | --- |",
        "| LoRA | 64 | - | 1.50 | 1.25 | 1.00 % |",
        "| PSOFT |  |  |  |  | 3.00 % |",
        "| BOFT | 1,234,567 | P, s | 1.00 | 1.52 |  |",
        "| pool |  |  | 10.00 | 12.50 |  |",
    ]
    assert "NVIDIA H200, jax 0.11.2" in text and "6 layers" in text


def test_the_table_that_lies_here_is_of_the_results_beside_it():
    files = [method_table.HERE / name for name in ("method_costs.json", "method_pool.json")]
    if not all(file.exists() for file in files):
        pytest.skip("the results are measured on a GPU, and do not lie here yet")
    costs, errors = (json.loads(file.read_text()) for file in files)
    written = (method_table.HERE / "METHODS.md").read_text()
    assert written == method_table.table(costs, errors), "run: python -m benchmarks.method_table"
