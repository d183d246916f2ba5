"""`scute bench`: kernels on a machine without a GPU, a search that is refused there, an engine."""

import json

import jax
import pytest
from files import lora_folder, model_folder

from scute_jax.bench.layer import TINY
from scute_jax.bench.tune import Found
from scute_jax.bench.work import QUICK
from scute_jax.cli import bench, main
from scute_jax.kernels import tuning
from scute_jax.kernels.block_rotate.tile import RotateTile

no_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "SMALL", TINY)
    monkeypatch.setattr(bench, "REFERENCE", QUICK)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda size: 1e9)


@no_gpu
def test_without_a_gpu_it_says_so_and_measures_the_reference(tmp_path, capsys):
    out = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--only", "rotate", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "there is no GPU here" in shown.err and "OFT, blocks of 32, 1024 rows" in shown.out
    report = json.loads(out.read_text())
    assert [row["what"] for row in report["kernels"]] == [
        "OFT, blocks of 32, 64 rows",
        "OFT, blocks of 32, 1024 rows",
    ]
    assert all(row["wall_us"] > 0 and row["bytes_us"] > 0 for row in report["kernels"])


@no_gpu
def test_a_search_without_a_gpu_is_refused(capsys):
    assert main(["bench", "kernels", "--tune"]) == 2
    assert "--tune needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch):
    """A search that finds 512 columns at once, whatever the machine."""

    def found(task, repeats, say):
        tiles = tuple(kind() for kind in task.kinds)
        return Found(task, (RotateTile(columns=512),) if task.op == "rotate" else tiles, 9, 8)

    monkeypatch.setattr(bench.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench, "tune", found)


def test_a_search_writes_the_table_of_this_gpu(tmp_path, capsys, searched):
    path = tmp_path / "mine.json"
    call = ["bench", "kernels", "--tune", "--only", "rotate", "--rows", "64", "--table", str(path)]
    assert main(call) == 0
    table = json.loads(path.read_text())[jax.devices()[0].device_kind]
    assert table == {"RotateTile": {"rows<=64, block<=64": {"columns": 512}}}
    shown = capsys.readouterr()
    assert "1 of 1: rotate, rows<=64, block<=64" in shown.err
    assert f"set {tuning.VARIABLE}={path}" in " ".join(shown.out.split())


def test_a_table_that_cannot_be_written_is_refused_before_the_search(tmp_path, capsys, searched):
    path = tmp_path / "nowhere" / "mine.json"
    assert main(["bench", "kernels", "--tune", "--table", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}: No such file or directory; name another file with --table" in error


def test_an_engine_with_and_without_adapters(tmp_path, capsys):
    model, out = model_folder(tmp_path / "model"), tmp_path / "engine.json"
    adapter = f"helper={lora_folder(tmp_path / 'lora')}"
    call = ["bench", "engine", "--model", str(model), "--adapter", adapter, "--out", str(out)]
    call += ["--requests", "3", "--prompt-tokens", "5", "--max-tokens", "4"]
    assert main(call) == 0
    assert "base and adapters" in capsys.readouterr().out
    base, mixed = json.loads(out.read_text())["runs"]
    assert base["batch"] == "base" and mixed["batch"] == "base and adapters"
    assert all(run["tokens_per_s"] > 0 and run["prompts_ms"] > 0 for run in (base, mixed))


def test_a_step_needs_two_tokens(tmp_path, capsys):
    assert main(["bench", "engine", "--model", str(tmp_path), "--max-tokens", "1"]) == 2
    assert "--max-tokens 1" in capsys.readouterr().err
