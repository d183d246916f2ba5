"""Which adapters are on the device: slots of the bank, given by need and taken back by disuse."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from scute_jax.bank import AdapterBank, BankFull
from scute_jax.capacity import BankCapacity, capacity_for
from scute_jax.models.llama import Slots
from scute_jax.serving.registry import Tenant
from scute_jax.slots import narrow


class Residency:
    """At most `max_adapters` tenants on the device.

    A tenant that a running request uses stays; of the others the least recently used leaves first.
    Slots are known by the tenant's version, so that equal weights are there once.
    """

    def __init__(self, widths: Mapping[str, tuple[int, int]], max_adapters: int, dtype: jnp.dtype):
        self._widths, self.max_adapters, self._dtype = widths, max_adapters, dtype
        self.routes: frozenset[str] = frozenset()  # that tenants seen so far use
        self._bank: AdapterBank | None = None
        self._slot: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._tenant: dict[str, Tenant] = {}
        self._users: dict[str, int] = {}
        self._leaving: set[str] = set()
        self._views: dict[frozenset[str], Slots] = {}

    def reserve(self, tenants: Iterable[Tenant]) -> None:
        """Makes the bank so large that any `max_adapters` of these tenants fit together."""
        tenants = [tenant for tenant in tenants if tenant.adapter is not None]
        self.routes = self.routes.union(*(tenant.routes for tenant in tenants))
        capacity = capacity_for((t.adapter for t in tenants), self.max_adapters)
        if self._bank is None:
            self._rebuild(capacity)
        elif not self._bank.capacity.covers(capacity):
            self._rebuild(self._bank.capacity.union(capacity))

    def acquire(self, tenant: Tenant) -> int | None:
        """The slot of a tenant, -1 for the base model; None while all slots are in use.

        A tenant too large for the bank makes the bank grow (compiled steps are then compiled anew).
        """
        if tenant.adapter is None:
            return -1
        version = tenant.version
        if version not in self._slot and not self._load(tenant):
            return None
        self._slot.move_to_end(version)
        self._users[version] = self._users.get(version, 0) + 1
        self._leaving.discard(version)
        return self._slot[version]

    def release(self, tenant: Tenant) -> None:
        """Ends one use of a tenant."""
        if tenant.adapter is None:
            return
        self._users[tenant.version] -= 1
        if not self._users[tenant.version]:
            del self._users[tenant.version]
            if tenant.version in self._leaving:
                self._evict(tenant.version)

    def drop(self, tenant: Tenant) -> None:
        """The name of a tenant is gone: frees its slot, at once or when its last request ends."""
        if tenant.version in self._users:
            self._leaving.add(tenant.version)
        elif tenant.version in self._slot:
            self._evict(tenant.version)

    def resident(self) -> list[str]:
        """The versions on the device."""
        return list(self._slot)

    def slots(self, routes: frozenset[str]) -> Slots:
        """The slots of all sites, narrowed to some routes; the others are not there at all."""
        if self._bank is None:
            return {}
        if routes not in self._views:
            full = self._bank.slots.items()
            views = {site: narrow(slots, routes) for site, slots in full}
            self._views[routes] = {
                site: view for site, view in views.items() if jax.tree.leaves(view)
            }
        return self._views[routes]

    def _load(self, tenant: Tenant) -> bool:
        """Brings a tenant to the device; False if all slots or all room is in use."""
        if self._bank is None or not self._bank.capacity.covers(capacity_for([tenant.adapter], 1)):
            self.reserve([tenant])
        while True:
            try:
                slot = self._bank.insert(tenant.adapter)
            except BankFull:
                idle = next((v for v in self._slot if v not in self._users), None)
                if idle is None:
                    return False
                self._evict(idle)
            else:
                self._slot[tenant.version], self._tenant[tenant.version] = slot, tenant
                self._views.clear()
                return True

    def _evict(self, version: str) -> None:
        self._bank.clear(self._slot.pop(version))
        del self._tenant[version]
        self._leaving.discard(version)
        self._views.clear()

    def _rebuild(self, capacity: BankCapacity) -> None:
        """A larger bank with the same tenants in the same slots."""
        bank = AdapterBank(self._widths, capacity, self._dtype)
        for version, slot in self._slot.items():
            bank.insert(self._tenant[version].adapter, slot)
        self._bank = bank
        self._views.clear()
