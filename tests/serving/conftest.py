"""The fixtures of the engine's tests."""

from engines import engine, folders  # noqa: F401
