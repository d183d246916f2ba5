"""The table of results, from results made up here, and that of the results that lie in the repo."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import method_table

COSTS = {
    "machine": {
        "name": "NVIDIA H200",
        "bandwidth": 4e12,
        "cache_bandwidth": 5e12,
        "cache_bytes": 60 << 20,
        "launch": 1e-6,
    },
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
    paths = {name: tmp_path / name for name in ("costs", "errors", "shapes", "out")}
    paths["costs"].write_text(json.dumps(COSTS))
    paths["errors"].write_text(json.dumps(ERRORS))
    term = {"rank": 32, "shared": False, "u": False}
    site = dict.fromkeys(("R", "S"), None) | dict.fromkeys("sb", False) | {"P": [], "Q": []}
    at = {"layers.0.self_attn.o_proj": site | {"terms": [term]}}
    psoft = {"bytes": 2 * 32 * 8192, "elsewhere": 7, "live": [], "sites": at}
    paths["shapes"].write_text(json.dumps({"PSOFT": psoft}))
    given = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    monkeypatch.setattr(sys, "argv", ["method_table", *given])
    method_table.main()
    text = paths["out"].read_text()
    # Not timed: factors from memory, x and twice h of 16 rows in the cache, two launches.
    predicted = 524288 / 4e6 + 2 * 3 * 4096 / 5e6 + 2 / 16
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| method | bytes a tenant | live slots | predicted us | measured us | bfloat16 error |",
        "| --- | --- | --- | --- | --- | --- |",
        "| LoRA | 64 | - | 1.50 | 1.25 | 1.00 % |",
        f"| PSOFT | {32 * 524288 + 7:,} | - | {predicted:.2f} |  | 3.00 % |",
        "| BOFT | 1,234,567 | P, s | 1.00 | 1.52 |  |",
        "| pool |  |  | 10.00 | 12.50 |  |",
    ]
    assert "NVIDIA H200, jax 0.11.2" in text and "6 layers" in text


def test_the_table_that_lies_here_is_of_the_results_beside_it():
    files = [method_table.HERE / f"method_{name}.json" for name in ("costs", "pool", "shapes")]
    results = (json.loads(file.read_text()) for file in files)
    written = (method_table.HERE / "METHODS.md").read_text()
    assert written == method_table.table(*results), "run: python -m benchmarks.method_table"
