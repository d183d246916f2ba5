"""The engine: requests that name adapters in, texts out."""

from scute_jax.serving.async_engine import AsyncEngine, EngineStopped, Overloaded
from scute_jax.serving.device_memory import OutOfDeviceMemory
from scute_jax.serving.engine import AdapterInfo, Engine
from scute_jax.serving.options import EngineOptions
from scute_jax.serving.request import Chunk, Completion, Request, RequestError, SamplingParams
from scute_jax.serving.stats import AdapterStats, EngineStats

__all__ = [
    "AdapterInfo",
    "AdapterStats",
    "AsyncEngine",
    "Chunk",
    "Completion",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "EngineStopped",
    "OutOfDeviceMemory",
    "Overloaded",
    "Request",
    "RequestError",
    "SamplingParams",
]
