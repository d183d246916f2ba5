"""Small trained adapters of SmolLM2-135M-Instruct, one folder each; README.md lists them."""

from pathlib import Path


def demo_adapters() -> dict[str, Path]:
    """Name -> folder of each adapter, in the order of their names."""
    here = Path(__file__).parent
    return {file.parent.name: file.parent for file in sorted(here.glob("*/adapter_config.json"))}
