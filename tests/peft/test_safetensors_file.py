"""Reading safetensors files, sound and damaged."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from scute_jax import AdapterError
from scute_jax.peft.safetensors_file import DTYPES, SafetensorsFile

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([], np.float16),
    "c": np.array(7, np.int64),
}


def written(tmp_path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_come_as_they_were_saved(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(TENSORS, {"format": "pt"}))
    file = SafetensorsFile(path)
    assert file.shapes == {name: array.shape for name, array in TENSORS.items()}
    for name, array in TENSORS.items():
        assert file.read(name).dtype == array.dtype
        assert np.array_equal(file.read(name), array)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name: str, tmp_path: Path):
    values = np.array([0, 1, 1], DTYPES[name])
    entry = {"dtype": name, "shape": [3], "data_offsets": [0, values.nbytes]}
    file = SafetensorsFile(written(tmp_path, {"x": entry}, values.tobytes()))
    assert np.array_equal(file.read("x").view(np.uint8), values.view(np.uint8))


def test_bfloat16_keeps_its_numbers(tmp_path: Path):
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    entry = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    file = SafetensorsFile(written(tmp_path, {"x": entry}, values.tobytes()))
    assert file.read("x").astype(np.float32).tolist() == [1.5, -2.0]


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": F32}, b"1234567", "describes 8 bytes of data, the file holds 7"),
        ({"x": F32}, b"123456789", "describes 8 bytes of data, the file holds 9"),
        ({"x": F32 | {"shape": [3]}}, b"12345678", "'x' of shape .3. and dtype F32 needs 12 bytes"),
        ({"x": F32 | {"shape": [-2]}}, b"12345678", "'x' has shape"),
        ({"x": F32 | {"shape": [2.0]}}, b"12345678", "'x' has shape"),
        ({"x": F32 | {"shape": [True, 2]}}, b"12345678", "'x' has shape"),
        ({"x": F32 | {"data_offsets": [0, 8, 8]}}, b"12345678", "'x' has shape"),
        ({"x": F32 | {"data_offsets": [8, 0]}}, b"12345678", "needs 8 bytes, its offsets hold -8"),
        ({"x": F32 | {"dtype": "F31"}}, b"12345678", "tensor 'x' has dtype 'F31'; known are F64"),
        ({"x": [1]}, b"", "entry of 'x' lacks dtype"),
        ({"x": {"dtype": "F32"}}, b"", "entry of 'x' lacks dtype"),
        ({"x": F32, "y": F32}, b"12345678", "a hole or an overlap at byte 0"),
        ({"x": F32 | {"data_offsets": [8, 16]}}, b"1" * 16, "a hole or an overlap at byte 0"),
        ([1], b"", "header is a list"),
        (b"{", b"", "header is not JSON"),
        (b"\xff\xff", b"", "header is not JSON"),
        (b"[" * 100_000, b"", "header is not JSON"),
    ],
)
def test_damage_is_named(header, data, message, tmp_path: Path):
    path = written(tmp_path, header, data)
    with pytest.raises(AdapterError, match=message) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\0" * 8, b"\xff" * 200])
def test_a_header_longer_than_the_file(content: bytes, tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(AdapterError, match=r"x\.safetensors: truncated or corrupt: its header"):
        SafetensorsFile(path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_is_an_adapter_error(tmp_path_factory, data):
    """Whatever bytes change, the file is read as sound or refused, never anything else."""
    content = bytearray(save(TENSORS))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        file = SafetensorsFile(path)
    except AdapterError as error:
        assert str(path) in str(error)
    else:
        for name, shape in file.shapes.items():
            assert file.read(name).shape == shape


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(TENSORS))
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(AdapterError, match="tensor 'a' ends after"):
        [file.read(name) for name in file.shapes]
    path.unlink()
    with pytest.raises(AdapterError, match="cannot be read"):
        file.read("a")
