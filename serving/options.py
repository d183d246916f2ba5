"""The shapes and budgets of an engine, with a default for each kind of machine."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from scute_jax.kernels import Implementation
from scute_jax.models.cache import page_bytes
from scute_jax.models.config import LlamaConfig
from scute_jax.models.errors import ModelError
from scute_jax.peft.base import Base
from scute_jax.serving.scheduler import Limits

CPU_CACHE_BYTES = 512 << 20
GPU_SHARE = 0.9
ACTIVATION_SHARE = 0.08  # of the device, left for activations and compiled steps
RANK_TO_COME = 16  # of LoRAs at every projection, for which there is room however late they come


@dataclass(frozen=True)
class EngineOptions:
    """How an engine divides its machine. `defaults` fits them to the device that jax uses.

    `memory` is what the KV cache may take: a whole number is bytes, a fraction is a share of the
    device of which weights and adapters are taken off first: those that are registered when the
    first request comes (or the warm-up), and `max_adapters` LoRAs of rank 16 at least. Every shape
    in `prefill_blocks` and `decode_rows` is compiled once; both ascend.
    """

    max_adapters: int = 16  # resident at a time
    memory: int | float | None = None
    page_size: int = 16  # tokens per cache page
    block: int = 32  # tokens per prefill block
    prefill_blocks: tuple[int, ...] = (2, 16)
    decode_rows: tuple[int, ...] = (16,)
    steps: int = 8  # tokens per decode call
    ahead: int = 0  # calls launched before the results of the last one are read
    window: int = 4096  # requests that one `generate` or `stream` has in the engine at a time
    implementation: Implementation | None = None
    compilation_cache: str | Path | None = None  # folder of compiled steps, of the whole process

    def __post_init__(self) -> None:
        for name in ("max_adapters", "page_size", "block", "steps", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("prefill_blocks", "decode_rows"):
            shapes = getattr(self, name)
            if not shapes or list(shapes) != sorted(set(shapes)) or shapes[0] < 1:
                raise ValueError(f"{name} must ascend from 1 up, not {shapes}.")
        if isinstance(self.memory, float) and not 0 < self.memory <= 1:
            raise ValueError(
                f"memory={self.memory}: a fraction is a share of the device, above 0 and up to 1; "
                "give bytes as a whole number."
            )

    @classmethod
    def defaults(cls, **given) -> "EngineOptions":
        """The options of this machine, with what is given in their place."""
        gpu = dict(
            block=64,
            prefill_blocks=(4, 32, 128),
            decode_rows=(16, 64),
            steps=16,
            ahead=1,
        )
        machine = gpu if jax.default_backend() == "gpu" else {}
        return cls(**(machine | {k: v for k, v in given.items() if v is not None}))

    def use_compilation_cache(self) -> None:
        """Lets jax keep what it compiles in the folder, and find it there at the next start."""
        if self.compilation_cache is not None:
            jax.config.update("jax_compilation_cache_dir", str(self.compilation_cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

    def limits(self) -> Limits:
        return Limits(
            rows=self.decode_rows[-1],
            steps=self.steps,
            block=self.block,
            prefill_blocks=self.prefill_blocks,
            decode_rows=self.decode_rows,
        )

    def num_pages(self, config: LlamaConfig, dtype: jnp.dtype, bank: int = 0) -> int:
        """How many cache pages the budget holds, at most what all rows could ever use.

        `bank` says how many bytes of the device the adapters take already.
        Raises: ModelError if that is less than one page per decode row.
        """
        each = page_bytes(config, self.page_size, dtype)
        most = self.decode_rows[-1] * -(-config.max_context // self.page_size)
        budget = self._cache_bytes(max(0, self._adapter_bytes(config, dtype) - bank))
        if budget < each * self.decode_rows[-1]:
            raise ModelError(
                f"memory={self.memory} leaves {budget >> 20} MiB for the KV cache, but one page "
                f"for each of {self.decode_rows[-1]} rows takes "
                f"{each * self.decode_rows[-1] >> 20} MiB; give more memory, or have fewer rows or "
                "fewer adapters at a time (max_adapters=)."
            )
        return min(most, budget // each)

    def _adapter_bytes(self, config: LlamaConfig, dtype: jnp.dtype) -> int:
        """What `max_adapters` LoRAs of rank RANK_TO_COME take."""
        layers = (p for p in Base.from_config(config).projections if ".layers." in p.module)
        widths = sum(p.d_in + p.d_out for p in layers)
        return widths * RANK_TO_COME * jnp.dtype(dtype).itemsize * self.max_adapters

    def _cache_bytes(self, adapters: int) -> int:
        """The budget of the cache; `adapters` bytes of the device are for those to come."""
        if isinstance(self.memory, int):
            return self.memory
        stats = jax.local_devices()[0].memory_stats()
        if not stats or "bytes_limit" not in stats:  # a CPU does not say
            return CPU_CACHE_BYTES
        total, used = stats["bytes_limit"], stats["bytes_in_use"]
        share = GPU_SHARE if self.memory is None else self.memory
        return max(0, int(total * (share - ACTIVATION_SHARE)) - used - adapters)
