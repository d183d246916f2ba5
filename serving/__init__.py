"""The engine: requests that name adapters in, texts out."""

from scute_jax.serving.engine import AdapterInfo, Engine
from scute_jax.serving.options import EngineOptions
from scute_jax.serving.request import Chunk, Completion, Request, RequestError, SamplingParams
from scute_jax.serving.stats import AdapterStats, EngineStats

__all__ = [
    "AdapterInfo",
    "AdapterStats",
    "Chunk",
    "Completion",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "Request",
    "RequestError",
    "SamplingParams",
]
