"""Reading torch's files without torch: the same numbers, and no code of the file is run."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_jax import AdapterError
from scute_jax.peft.torch_file import TorchFile

REASON = "torch writes the files; it is not installed here"


def archive(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED, **storages: bytes):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        for key, data in storages.items():
            file.writestr(f"archive/data/{key.removeprefix('s')}", data)
    return path


class Storage:
    """What a pickle of torch refers to by a persistent id."""

    def __init__(self, kind: str, key: str, count: int):
        self.kind, self.key, self.count = kind, key, count


class Global:
    """Pickled as the name of a global, whatever that is."""

    def __init__(self, name: str):
        self.name = name

    def __reduce__(self):
        return self.name


class Call:
    def __init__(self, function: str, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        raise AssertionError("pickled by Pickler.reducer_override")


class Pickler(pickle._Pickler):  # the one in Python, which can be told to write any name
    def persistent_id(self, obj):
        if isinstance(obj, Storage):
            return ("storage", Global(f"torch {obj.kind}"), obj.key, "cpu", obj.count)
        return None

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Global):
            self.write(f"c{obj.name.replace(' ', chr(10))}\n".encode())
        elif isinstance(obj, Call):
            self.save(Global(obj.function))
            self.save(obj.args)
            self.write(pickle.REDUCE)
        else:
            super().save(obj, save_persistent_id)


def pickled(obj) -> bytes:
    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(obj)
    return buffer.getvalue()


def tensor(
    key: str = "0", count: int = 6, offset=0, size=(2, 3), stride=(3, 1), kind="FloatStorage"
):
    storage = Storage(kind, key, count)
    return Call(
        "torch._utils _rebuild_tensor_v2", storage, offset, size, stride, False, OrderedDict()
    )


DATA = np.arange(6, dtype=np.float32)


def test_tensors_without_torch(tmp_path: Path):
    state = OrderedDict(a=tensor(), b=tensor(size=(2,), stride=(2,), offset=1))
    state["c"] = Call(
        "torch._utils _rebuild_parameter", tensor(size=(3, 2), stride=(1, 3)), True, None
    )
    file = TorchFile(archive(tmp_path / "x.bin", pickled(state), s0=DATA.tobytes()))
    assert file.shapes == {"a": (2, 3), "b": (2,), "c": (3, 2)}
    assert np.array_equal(file.read("a"), DATA.reshape(2, 3))
    assert np.array_equal(file.read("b"), DATA[[1, 3]])
    assert np.array_equal(file.read("c"), DATA.reshape(2, 3).T)


@pytest.mark.parametrize(
    "dtype", "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()
)
def test_torch_writes_what_we_read(dtype: str, tmp_path: Path):
    torch = pytest.importorskip("torch", reason=REASON)
    values = torch.randint(0, 2, (4, 5)).to(getattr(torch, dtype))
    state = {
        "a": values,
        "view": values.T[1:, ::2],
        "p": torch.nn.Parameter(torch.ones(3)),
        "e": values[:0],
    }
    torch.save(state, tmp_path / "x.bin")
    file = TorchFile(tmp_path / "x.bin")
    for name, expected in state.items():
        ours = file.read(name).astype(np.float64)
        assert np.array_equal(ours, expected.detach().double().numpy())


@pytest.mark.parametrize(
    "name",
    ["os system", "builtins eval", "posix system", "torch load", "numpy load", "builtins getattr"],
)
def test_other_names_are_refused_and_not_run(name: str, tmp_path: Path):
    witness = tmp_path / "ran"
    evil = OrderedDict(a=Call(name, f"touch {witness}"))
    path = archive(tmp_path / "x.bin", pickled(evil))
    with pytest.raises(AdapterError, match=rf"x\.bin.*asks for {name.replace(' ', '.')}.*not run"):
        TorchFile(path)
    assert not witness.exists()


def test_a_plain_pickle_is_not_even_opened(tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "x.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(AdapterError, match="not a zip archive"):
        TorchFile(tmp_path / "x.bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "state",
    [
        {"a": tensor(count=7)},
        {"a": tensor(size=(3, 3))},
        {"a": tensor(offset=1)},
        {"a": tensor(offset=-1)},
        {"a": tensor(stride=(-3, 1))},
        {"a": tensor(size=(10**6, 10**6), stride=(0, 0))},
        {"a": tensor(stride=(3,))},
        {"a": tensor(key="1")},
        {"a": tensor(kind="DoubleStorage", count=3)},
        {"a": Call("torch._utils _rebuild_tensor_v2", 3, 0, (1,), (1,))},
        {"a": Call("collections OrderedDict", 3)},
        {"a": 3},
        {1: tensor()},
        [tensor()],
        tensor(),
    ],
)
def test_what_is_no_mapping_of_sound_tensors_is_refused(state, tmp_path: Path):
    path = archive(tmp_path / "x.bin", pickled(state), s0=DATA.tobytes())
    with pytest.raises(AdapterError, match=r"x\.bin.*save_pretrained"):
        TorchFile(path)


def test_one_storage_is_of_one_type(tmp_path: Path):
    state = {"a": tensor(), "b": tensor(kind="HalfStorage", count=6)}
    with pytest.raises(AdapterError, match="storage 0 holds 6 elements of float32"):
        TorchFile(archive(tmp_path / "x.bin", pickled(state), s0=DATA.tobytes()))


def test_compressed_storages_are_refused(tmp_path: Path):
    path = archive(
        tmp_path / "x.bin", pickled({"a": tensor()}), zipfile.ZIP_DEFLATED, s0=DATA.tobytes()
    )
    with pytest.raises(AdapterError, match="storage 0 is compressed"):
        TorchFile(path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_is_an_adapter_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.bin"
    content = bytearray(archive(path, pickled({"a": tensor()}), s0=DATA.tobytes()).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        file = TorchFile(path)
    except AdapterError as error:
        assert str(path) in str(error)
    else:
        assert all(file.read(name).shape == shape for name, shape in file.shapes.items())
