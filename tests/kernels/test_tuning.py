"""The table of tiles: what a shape gets, what an odd table says, and that kernels ask it."""

import json
import tomllib
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scute_jax.bench.layer import factors
from scute_jax.bench.tune import KINDS
from scute_jax.kernels import at_tiles, tuning
from scute_jax.kernels.segmented_shrink.pallas_triton import segmented_shrink
from scute_jax.kernels.tiles import make_tiles


@dataclass(frozen=True)
class Wide:
    columns: int = 256
    num_warps: int = 4


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a table and makes it the one that is asked; its entries are of this device."""

    def write(content) -> Path:
        path = tmp_path / "tuning.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv(tuning.VARIABLE, str(path))
        return path

    return write


DEVICE = jax.devices()[0].device_kind


def test_an_entry_holds_for_its_bucket_and_device_only(table):
    entry = {"Wide": {"rows<=64, rank<=16": {"columns": 512}}}
    table({DEVICE: entry})
    assert tuning.tuned(Wide, rows=17, rank=16) == Wide(columns=512)
    assert tuning.tuned(Wide, rows=64, rank=1) == Wide(columns=512)
    for rows, rank in ((16, 16), (65, 16), (64, 17)):
        assert tuning.tuned(Wide, rows=rows, rank=rank) == Wide()
    table({"another GPU": entry})
    assert tuning.tuned(Wide, rows=17, rank=16) == Wide()


def test_the_last_bucket_is_open():
    assert tuning.bucket(rows=4096, rank=0, columns=20000) == "rows<=4096, rank<=0, columns>16384"


@pytest.mark.parametrize(
    "content, said",
    [
        (
            {"Wide": {"rows<=16": {"colums": 512}}},
            "Wide, rows<=16: there is no field 'colums', only",
        ),
        ({"Wide": {"rows<=16": {"columns": "512"}}}, "columns is '512'; it has to be a whole"),
        ({"Wide": {"rows<=16": 512}}, "fields have to be the keys of an object"),
        ({"Wide": [1]}, "buckets have to be the keys"),
    ],
)
def test_an_odd_table_is_refused_by_file_and_field(table, content, said):
    path = table({DEVICE: content})
    with pytest.raises(ValueError, match=said) as refused:
        tuning.tuned(Wide, rows=9)
    assert str(path) in str(refused.value)


def test_a_table_that_is_no_json_is_named(table):
    path = table("{")
    with pytest.raises(ValueError, match="this is no JSON") as refused:
        tuning.tuned(Wide, rows=9)
    assert str(path) in str(refused.value)


def test_a_kernel_asks_the_table_when_it_is_traced(table):
    """An odd entry for just this shape is met by it, and by no other."""
    table({DEVICE: {"ShrinkTile": {"rows<=16, rank<=16": {"no_such_field": 1}}}})
    pool = (factors(jax.random.key(0), (3, 5), 24, 8, jnp.float32),)

    def shrink(rows):
        slots = jnp.asarray(np.arange(rows) * 2 // rows, jnp.int32)
        x = jnp.ones((rows, 24), jnp.float32)
        tiles = make_tiles(slots, 2, 16)
        at = (at_tiles(pool[0], tiles.slot),)
        return segmented_shrink(x, at, tiles, interpret=True)

    with pytest.raises(ValueError, match="rows<=16, rank<=16: there is no field 'no_such_field'"):
        shrink(11)
    assert shrink(18)[0].shape[2] == 16


def test_the_table_that_is_shipped_is_sound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    kinds = {kind.__name__: kind for kind in KINDS}
    for device, of_device in tuning.read_table(tuning.table_path()).items():
        for name, buckets in of_device.items():
            for bucket, entry in buckets.items():
                tuning.tile_of(kinds[name], entry, f"{device}, {name}, {bucket}")


def test_all_kinds_of_tile_have_defaults():
    for kind in KINDS:
        assert all(isinstance(getattr(kind(), field.name), int) for field in fields(kind))


def test_it_is_packaged():
    assert files("scute_jax.kernels").joinpath("tuning.json").is_file()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "tuning.json" in project["tool"]["setuptools"]["package-data"]["scute_jax.kernels"]
