"""The command that made a result, to be kept beside it."""

import sys
from pathlib import Path


def command() -> str:
    """How this program was started with `python -m`; of files, the names only."""
    spec = sys.modules["__main__"].__spec__
    words = (Path(word).name if "/" in word else word for word in sys.argv[1:])
    return " ".join(("python -m", spec.name if spec else Path(sys.argv[0]).name, *words))
