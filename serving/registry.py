"""The adapters that requests can name, in host memory, and what a name means to a request."""

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

import jax
import numpy as np

from scute_jax.capacity import BankCapacity, capacity_for, pair_ranks
from scute_jax.errors import AdapterError
from scute_jax.models.adapters import for_llama, route
from scute_jax.normal_form import Adapter
from scute_jax.scale import scaled
from scute_jax.stack import stack

BASE_VERSION = "base"
NOTHING = BankCapacity(adapters=0, entries={}, sizes={})


@dataclass(frozen=True, eq=False)
class Tenant:
    """What a request runs with: the base model (no adapter), one adapter, or a stack of them.

    A request keeps its tenant: replacing or removing the name later does not touch it.
    """

    version: str  # equal versions compute the same function
    names: tuple[str, ...]
    adapter: Adapter | None = field(repr=False)
    routes: frozenset[str] = frozenset()  # what it takes, see scute_jax.models.adapters.route
    need: BankCapacity = field(repr=False, default=NOTHING)  # what it alone takes of a bank
    pairs: Mapping[str, int] = field(repr=False, default_factory=dict)  # the rank of each
    parts: tuple[str, ...] = ()  # the versions of the adapters that it is made of


BASE = Tenant(version=BASE_VERSION, names=(), adapter=None)


class Registry:
    """Adapters by name. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._adapters: dict[str, Adapter] = {}
        # Tenants of single names, and those of stacks and scales as long as they are used.
        self._tenants: dict[str, Tenant] = {}
        self._names: Counter[str] = Counter()  # how many names lead to a version
        self._made: weakref.WeakValueDictionary[str, Tenant] = weakref.WeakValueDictionary()

    def add(self, name: str, adapter: Adapter) -> tuple[Tenant, Tenant | None]:
        """Registers `adapter` under `name`; returns its tenant and the one that had the name."""
        tenant = _tenant(adapter, (name,), (adapter.version,))
        with self._lock:
            before = self._tenants.get(name)
            self._adapters[name], self._tenants[name] = adapter, tenant
            self._names[tenant.version] += 1
            if before is not None:
                self._unname(before)
        return tenant, before

    def remove(self, name: str) -> None:
        """Forgets a name. Raises: AdapterError if there is none."""
        with self._lock:
            self._known((name,))
            del self._adapters[name]
            self._unname(self._tenants.pop(name))

    def wanted(self, tenant: Tenant) -> bool:
        """Whether names lead to every adapter that the tenant is made of."""
        with self._lock:
            return all(version in self._names for version in tenant.parts)

    def adapters(self) -> dict[str, Adapter]:
        """The adapters by name, as they were loaded."""
        with self._lock:
            return dict(self._adapters)

    def tenants(self) -> dict[str, Tenant]:
        """What each registered name means to a request now."""
        with self._lock:
            return dict(self._tenants)

    def resolve(self, names: tuple[str, ...], scales: tuple[float, ...] = ()) -> Tenant:
        """The tenant of these names, each at its scale (default 1), stacked in order.

        Raises: AdapterError for an unknown name, or a scale that the method does not allow.
        """
        if not names:
            return BASE
        scales = scales or (1.0,) * len(names)
        with self._lock:
            self._known(names)
            if scales == (1.0,):
                return self._tenants[names[0]]
            adapters = [self._adapters[name] for name in names]
            parts = tuple(adapter.version for adapter in adapters)
            key = "+".join(f"{f!r}*{part}" for f, part in zip(scales, parts, strict=True))
            tenant = self._made.get(key)
        if tenant is None:
            with np.errstate(over="ignore", invalid="ignore"):  # said by name below
                made = reduce(stack, map(scaled, adapters, scales))
            check_finite(made, " + ".join(names))
            tenant = _tenant(made, names, parts)
            with self._lock:
                tenant = self._made.setdefault(key, tenant)
        return tenant

    def _unname(self, tenant: Tenant) -> None:
        self._names[tenant.version] -= 1
        if not self._names[tenant.version]:
            del self._names[tenant.version]

    def _known(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._adapters:
                some = ", ".join(sorted(self._adapters)[:8]) or "none"
                more = max(0, len(self._adapters) - 8)
                raise AdapterError(
                    f"no adapter is called {name!r}; there are: {some}"
                    + (f" and {more} more." if more else ".")
                )


def _tenant(adapter: Adapter, names: tuple[str, ...], parts: tuple[str, ...]) -> Tenant:
    ready = for_llama(adapter)
    need = capacity_for([ready], 1)
    entries = need.entries.items()
    routes = frozenset(route(site, kind) for site, kinds in entries for kind in kinds)
    used = ready if routes else None  # one that does nothing needs no slot
    return Tenant(adapter.version, names, used, routes, need, pair_ranks(ready), parts)


def check_finite(adapter: Adapter, name: str) -> None:
    """Raises AdapterError naming site and slot if a number is NaN or infinite.

    Sites may hold the same memory, the factors of a shared pair above all: it is looked at once.
    """
    seen = set()
    for site, form in adapter.sites.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(form):
            if isinstance(leaf, np.ndarray):
                memory = leaf.__array_interface__["data"][0], leaf.shape, leaf.strides, leaf.dtype
                if memory in seen:
                    continue
                seen.add(memory)
            if not np.isfinite(np.asarray(leaf)).all():
                raise AdapterError(
                    f"{name}: {site}{jax.tree_util.keystr(path)} holds numbers that are not "
                    "finite; the adapter would give no text. Was its training diverging, or the "
                    "scale too large for float32?"
                )
