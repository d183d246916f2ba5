"""`python -m scute_jax.cli` is `scute`."""

import sys

from scute_jax.cli.main import main

sys.exit(main())
