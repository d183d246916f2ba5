"""The files of an adapter folder: adapter_config.json beside adapter_model.safetensors or .bin."""

from os import PathLike
from pathlib import Path

from scute_jax.errors import AdapterError
from scute_jax.peft.options import Options
from scute_jax.peft.safetensors_file import SafetensorsFile
from scute_jax.peft.torch_file import TorchFile

CONFIG, SAFETENSORS, PICKLED = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)


def open_checkpoint(path: str | PathLike) -> tuple[Options, SafetensorsFile | TorchFile]:
    """The config and the tensors of a folder; safetensors wins where a .bin lies beside it.

    Raises: AdapterError naming the folder or file that is missing or damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise AdapterError(
            f"{folder}: {found}; needed the folder of an adapter, with {CONFIG} and {SAFETENSORS}."
        )
    options = Options.read(folder / CONFIG)
    if (folder / SAFETENSORS).is_file():
        return options, SafetensorsFile(folder / SAFETENSORS)
    if (folder / PICKLED).is_file():
        return options, TorchFile(folder / PICKLED)
    held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10])
    raise AdapterError(
        f"{folder}: neither {SAFETENSORS} nor {PICKLED} is there, only {held}; copy the tensors of "
        "the adapter into the folder."
    )
