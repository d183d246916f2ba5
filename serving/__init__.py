"""The engine: requests that name adapters in, texts out."""

from scute_jax.serving.engine import AdapterInfo, Engine
from scute_jax.serving.options import EngineOptions
from scute_jax.serving.request import Chunk, Completion, Request, RequestError, SamplingParams

__all__ = [
    "AdapterInfo",
    "Chunk",
    "Completion",
    "Engine",
    "EngineOptions",
    "Request",
    "RequestError",
    "SamplingParams",
]
