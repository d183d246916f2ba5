"""Fields of adapter_config.json by type, and which of them are left unexplained."""

import json
from pathlib import Path

import pytest

from scute_jax import AdapterError
from scute_jax.peft.options import Options


def options(**fields) -> Options:
    return Options(fields, Path("here/adapter_config.json"))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int, [0, -3], [1.5, True, "1", [1]]),
        (float, [1, 2.5], [float("nan"), float("inf"), 10**400, True, "2"]),
        (bool, [True, False], [0, 1, "true"]),
        (str, ["", "x"], [1, True, ["x"]]),
        (dict, [{}, {"a": 1}], [[], "x"]),
    ],
)
def test_values_are_of_their_kind(kind, good, bad):
    for value in good:
        assert options(x=value).get("x", kind=kind) == value
    for value in bad:
        with pytest.raises(AdapterError, match=r"adapter_config\.json: field 'x' is .*needed"):
            options(x=value).get("x", kind=kind)


def test_null_is_what_peft_makes_of_it():
    assert options().get("x", 5, kind=int) == 5
    assert options(x=None).get("x", kind=int) is None
    assert options(x=None).get("x", True) is True
    assert options(x=None).get("x", True, kind=bool) is False
    for kind, default in ((int, 5), (float, 0.5), (str, "none"), (dict, {})):
        with pytest.raises(AdapterError, match="field 'x' is None; needed"):
            options(x=None).get("x", default, kind=kind)
    for fields in ({}, {"x": None}):
        with pytest.raises(AdapterError, match="field 'x' is .*state it"):
            options(**fields).get("x", required=True)


def test_choices():
    assert options(x="a").get("x", choices=("a", "b")) == "a"
    with pytest.raises(AdapterError, match="field 'x' is 'c'; known are 'a', 'b'"):
        options(x="c").get("x", choices=("a", "b"))


def test_what_nobody_read_is_unexplained_unless_it_is_off():
    off = {"a": None, "b": False, "c": "", "d": [], "e": {}, "inference_mode": True, "r": 8}
    config = options(**off, scale=0, offset=0.0, flag=True, gate=1)
    config.get("r")
    assert config.unexplained(inert=("flag",)) == ["scale", "offset", "gate"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "holds a list, needed a JSON object"),
        ('{"r": 8}', "not a PEFT adapter: peft_type is None"),
        ('{"peft_type": 3}', "not a PEFT adapter: peft_type is 3"),
    ],
)
def test_files_that_are_no_config(text: str, message: str, tmp_path: Path):
    path = tmp_path / "adapter_config.json"
    path.write_text(text)
    with pytest.raises(AdapterError, match=message) as error:
        Options.read(path)
    assert str(path) in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path):
    path = tmp_path / "adapter_config.json"
    path.write_bytes(b'\xff\xfe{"peft_type": "LORA"}')
    with pytest.raises(AdapterError, match="not JSON"):
        Options.read(path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"peft_type": "LORA"}).encode())
    assert Options.read(path).fields["peft_type"] == "LORA"  # a byte order mark is harmless
