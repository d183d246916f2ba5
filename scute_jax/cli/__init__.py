"""The command line: `scute generate | inspect | convert | bench | demo`.

Results go to files or stdout, what it is doing meanwhile to stderr. Exit codes: 0 = done, 1 = done,
but something was refused, 2 = nothing was done because the call was wrong.
"""

from scute_jax.cli.main import main

__all__ = ["main"]
