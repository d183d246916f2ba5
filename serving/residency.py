"""Which adapters are on the device: slots of the bank, given by need and taken back by disuse."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp

from scute_jax.bank import AdapterBank, BankFull
from scute_jax.bank_arrays import bank_bytes
from scute_jax.bank_pools import View
from scute_jax.capacity import BankCapacity
from scute_jax.models.adapters import kinds_at
from scute_jax.models.llama import Slots
from scute_jax.serving.device_memory import OutOfDeviceMemory, out_of_memory
from scute_jax.serving.registry import Tenant
from scute_jax.serving.room import Room
from scute_jax.slots import SiteSlots, narrow


class Residency:
    """At most `max_adapters` tenants on the device.

    A tenant that a running request uses stays; of the others the least recently used leaves first,
    and at once where `wanted` says that no name leads to it any more.
    Slots are known by the tenant's version, so that equal weights are there once.
    """

    def __init__(
        self,
        widths: Mapping[str, tuple[int, int]],
        max_adapters: int,
        dtype: jnp.dtype,
        wanted: Callable[[Tenant], bool] = lambda tenant: True,
    ):
        self._widths, self.max_adapters, self._dtype = widths, max_adapters, dtype
        self._wanted = wanted
        self._room = Room(max_adapters)
        self._too_large: int | None = None  # bytes of a bank that was given up
        self.loads = 0
        self._bank: AdapterBank | None = None
        self._slot: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._tenant: dict[str, Tenant] = {}
        self._users: dict[str, int] = {}
        self._views: dict[frozenset[str], View] = {}  # of the bank that is there
        self._read: dict[frozenset[str], Slots] = {}  # since the last write to it

    @property
    def routes(self) -> frozenset[str]:
        """The routes that tenants seen so far use."""
        return self._room.routes

    @property
    def nbytes(self) -> int:
        """Bytes that the bank takes now."""
        return 0 if self._bank is None else self._bank.nbytes

    def expect(self, tenant: Tenant) -> None:
        """Plans for a tenant; the bank is made that large when one that needs it is acquired."""
        self._room.add(tenant)

    def prepare(self) -> None:
        """Makes the bank so large that any `max_adapters` of the tenants expected fit together.

        Raises: OutOfDeviceMemory if the device has no room for it; then the bank is as it was.
        """
        self._mend()
        before = None if self._bank is None else self._bank.capacity
        needed = self._room.needed()
        if not self.routes or (before is not None and before.covers(needed)):
            return
        with self._restored(f"{self.max_adapters} adapters of the sizes that are registered"):
            self._rebuild(needed if before is None else self._room.grown(before))

    def warm_up(self) -> None:
        """Prepares the bank and compiles what adapters need to come and go."""
        self.prepare()
        if self._bank is not None:
            self._read.clear()
            self._bank.warm_up()

    def acquire(self, tenant: Tenant) -> int | None:
        """The slot of a tenant, -1 for the base model; None while all slots are in use.

        A tenant too large for the bank makes the bank grow (compiled steps are then compiled anew).
        Raises: OutOfDeviceMemory if it finds no room on the device; then all is as it was.
        """
        if tenant.adapter is None:
            return -1
        version = tenant.version
        if version not in self._slot and not self._load(tenant):
            return None
        self._slot.move_to_end(version)
        self._users[version] = self._users.get(version, 0) + 1
        return self._slot[version]

    def release(self, tenant: Tenant) -> None:
        """Ends one use of a tenant."""
        if tenant.adapter is None:
            return
        self._users[tenant.version] -= 1
        if not self._users[tenant.version]:
            del self._users[tenant.version]
            self._leave(tenant)

    def tidy(self) -> None:
        """Frees the slots of tenants that nobody uses and no name leads to."""
        for tenant in list(self._tenant.values()):
            self._leave(tenant)

    def _leave(self, tenant: Tenant) -> None:
        version = tenant.version
        if version in self._slot and version not in self._users and not self._wanted(tenant):
            self._evict(version)

    def resident(self) -> dict[str, int]:
        """The slot of each version on the device."""
        return dict(self._slot)

    def names(self, version: str) -> tuple[str, ...]:
        """The adapters that a version on the device is made of."""
        return self._tenant[version].names

    @property
    def lost(self) -> bool:
        """Whether a failure took the bank with it."""
        return bool(self._slot) if self._bank is None else self._bank.lost

    def slots(self, routes: frozenset[str]) -> Slots:
        """The slots of all sites, narrowed to some routes; the others are not there at all."""
        self._mend()
        if self._bank is None:
            assert not self._slot, "tenants without a bank"
            return {}
        if routes not in self._views:
            self._views[routes] = self._bank.view(partial(_narrowed, routes))
        if routes not in self._read:
            self._read[routes] = self._bank.read(self._views[routes])
        return self._read[routes]

    def forget(self) -> None:
        """Starts over with an empty device; nobody may use a tenant now."""
        assert not self._users
        self._slot.clear()
        self._tenant.clear()
        self._drop()

    def _load(self, tenant: Tenant) -> bool:
        """Brings a tenant to the device; False if all slots or all room is in use."""
        if len(self._slot) == self.max_adapters and len(self._users) == len(self._slot):
            return False
        self._mend()
        if self._bank is None or not self._bank.capacity.covers(tenant.need):
            self.prepare()
            if self._bank is None or not self._bank.capacity.covers(tenant.need):
                self.expect(tenant)  # a stack, or another scale
                self.prepare()
        with self._restored(" + ".join(tenant.names)):
            return self._insert(tenant)

    @contextmanager
    def _restored(self, what: str) -> Iterator[None]:
        """Rebuilds the bank as it was if the device runs out of memory, and says so."""
        before = None if self._bank is None else self._bank.capacity
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            self._drop()
            if before is not None:
                self._rebuild(before)
            raise OutOfDeviceMemory(
                f"the device has no memory left for {what}; give the KV cache less (memory=), or "
                "have fewer adapters there at a time (max_adapters=)."
            ) from error

    def _insert(self, tenant: Tenant) -> bool:
        while True:
            idle = next((version for version in self._slot if version not in self._users), None)
            try:
                if len(self._slot) < self.max_adapters:
                    slot = self._bank.insert(tenant.adapter)
                elif idle is None:
                    return False
                else:
                    slot = self._slot[idle]
                    self._bank.replace(slot, tenant.adapter)
                    del self._slot[idle], self._tenant[idle]
            except BankFull:
                if idle is None:
                    return False
                self._evict(idle)
            else:
                self._slot[tenant.version], self._tenant[tenant.version] = slot, tenant
                self._read.clear()
                self.loads += 1
                return True

    def _evict(self, version: str) -> None:
        slot = self._slot.pop(version)
        del self._tenant[version]
        self._read.clear()
        if self._bank is None or self._bank.lost:
            return
        try:
            self._bank.clear(slot)
        except jax.errors.JaxRuntimeError as error:  # the bank is mended before it is used again
            if not out_of_memory(error):
                raise

    def _mend(self) -> None:
        """Makes a bank anew in which a write failed halfway."""
        if self._bank is not None and self._bank.lost:
            with self._restored("the adapters that are there"):
                self._rebuild(self._bank.capacity)

    def _rebuild(self, capacity: BankCapacity) -> None:
        """A bank with the same tenants in the same slots.

        Raises: OutOfDeviceMemory if it is as large as one that left no room for anything else.
        """
        nbytes = bank_bytes(self._widths, capacity, self._dtype)
        if self._too_large is not None and nbytes >= self._too_large:
            raise OutOfDeviceMemory(
                f"room for {self.max_adapters} adapters of the sizes that are registered takes "
                f"{nbytes >> 20} MiB, which leaves none for a KV cache; have fewer adapters at a "
                "time (max_adapters=), or give more memory (memory=)."
            )
        self._drop()  # frees the old one first, unless a step still runs on it
        bank = AdapterBank(self._widths, capacity, self._dtype)
        for version, slot in self._slot.items():
            bank.insert(self._tenant[version].adapter, slot)
        self._bank = bank

    def give_up(self) -> None:
        """Lets the bank go, which has no tenants yet, and makes none of its size again."""
        assert not self._slot and self._bank is not None
        self._too_large = self._bank.nbytes
        self._drop()

    def _drop(self) -> None:
        self._bank = None
        self._views.clear()
        self._read.clear()


def _narrowed(routes: frozenset[str], site: str, slots: SiteSlots) -> SiteSlots:
    return narrow(slots, kinds_at(site, routes))
