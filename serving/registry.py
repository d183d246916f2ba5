"""The adapters that requests can name, in host memory, and what a name means to a request."""

import threading
import weakref
from dataclasses import dataclass, field
from functools import reduce

from scute_jax.entries import kinds
from scute_jax.errors import AdapterError
from scute_jax.models.adapters import for_llama
from scute_jax.normal_form import Adapter
from scute_jax.stack import stack

BASE_VERSION = "base"


@dataclass(frozen=True, eq=False)
class Tenant:
    """What a request runs with: the base model (no adapter), one adapter, or a stack of them.

    A request keeps its tenant: replacing or removing the name later does not touch it.
    """

    version: str  # equal versions compute the same function
    names: tuple[str, ...]
    adapter: Adapter | None = field(repr=False)
    routes: frozenset[str] = frozenset()  # the kinds of its entries, see scute_jax.entries


BASE = Tenant(version=BASE_VERSION, names=(), adapter=None)


class Registry:
    """Adapters by name. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._adapters: dict[str, Adapter] = {}
        # Tenants of single names, and of stacks as long as a request uses them.
        self._tenants: dict[str, Tenant] = {}
        self._stacks: weakref.WeakValueDictionary[str, Tenant] = weakref.WeakValueDictionary()

    def add(self, name: str, adapter: Adapter) -> Tenant | None:
        """Registers `adapter` under `name`; returns the tenant that had the name before."""
        tenant = _tenant(adapter, (name,))
        with self._lock:
            before = self._tenants.get(name)
            self._adapters[name], self._tenants[name] = adapter, tenant
        return before

    def remove(self, name: str) -> Tenant:
        """Forgets a name. Raises: AdapterError if there is none."""
        with self._lock:
            self._known((name,))
            del self._adapters[name]
            return self._tenants.pop(name)

    def adapters(self) -> dict[str, Adapter]:
        """The adapters by name, as they were loaded."""
        with self._lock:
            return dict(self._adapters)

    def tenants(self) -> list[Tenant]:
        """Every registered name as a tenant of its own."""
        with self._lock:
            return list(self._tenants.values())

    def resolve(self, names: tuple[str, ...]) -> Tenant:
        """The tenant of these names, stacked in order. Raises: AdapterError for an unknown name."""
        if not names:
            return BASE
        with self._lock:
            self._known(names)
            if len(names) == 1:
                return self._tenants[names[0]]
            adapters = [self._adapters[name] for name in names]
            key = "+".join(adapter.version for adapter in adapters)
            tenant = self._stacks.get(key)
        if tenant is None:
            tenant = _tenant(reduce(stack, adapters), names)
            with self._lock:
                tenant = self._stacks.setdefault(key, tenant)
        return tenant

    def _known(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._adapters:
                some = ", ".join(sorted(self._adapters)[:8]) or "none"
                more = max(0, len(self._adapters) - 8)
                raise AdapterError(
                    f"no adapter is called {name!r}; there are: {some}"
                    + (f" and {more} more." if more else ".")
                )


def _tenant(adapter: Adapter, names: tuple[str, ...]) -> Tenant:
    ready = for_llama(adapter)
    routes = frozenset().union(*(kinds(form) for form in ready.sites.values()))
    return Tenant(adapter.version, names, ready, routes)
