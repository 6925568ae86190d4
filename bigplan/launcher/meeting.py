"""Where ranks of several nodes meet: an actor that keeps their addresses, asked through Ray.

Ray only accepts connections with the cluster's token. A TCPStore would listen on all interfaces,
and a FileStore needs a folder that all nodes share. Values are bytes, and nothing unpickles them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

LONGEST = timedelta(minutes=10)  # until a key is there


class Board:
    """Keys and values; an actor, whose calls run beside each other."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        await self._put(key, value)

    async def added(self, key: str, amount: int) -> int:
        """Add to a number, which begins with 0; what it is then."""
        total = int(self._values.get(key, b"0")) + amount
        await self._put(key, str(total).encode())
        return total

    async def exchanged(self, key: str, expected: bytes, wanted: bytes) -> bytes:
        """Set a key that has the expected value, or none and nothing is expected; its value."""
        found = self._values.get(key, b"")
        if found != expected:
            return found or expected
        await self._put(key, wanted)
        return wanted

    async def found(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        """The keys' values once all are there; None: some were not there in time."""
        async with self._changed:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait_for(lambda: all(key in self._values for key in keys))
            except TimeoutError:
                return None
        return [self._values[key] for key in keys]

    async def has(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return all(key in self._values for key in keys)

    async def removed(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self._values.pop(key, None) is not None

    async def number(self) -> int:
        """The number of keys."""
        return len(self._values)

    async def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        async with self._changed:
            self._changed.notify_all()


class BoardStore(Store):
    """A board as torch.distributed wants it; its maker must keep it alive, as torch does not."""

    def __init__(self, board: Any) -> None:
        super().__init__()
        self._board = board

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._ask("put", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The key's value, once it is there. Raises DistStoreError if it does not come."""
        return self._found([key], LONGEST)[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number; what it is then."""
        total: int = self._ask("added", key, value)
        return total

    def compare_set(self, key: str, expected: bytes | str, wanted: bytes | str) -> bytes:
        """Set a key that has the expected value; its value then."""
        value: bytes = self._ask("exchanged", key, _bytes(expected), _bytes(wanted))
        return value

    def wait(self, keys: list[str], timeout: timedelta = LONGEST) -> None:
        """Return once all keys are there. Raises DistStoreError."""
        self._found(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        there: bool = self._ask("has", keys)
        return there

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        was: bool = self._ask("removed", key)
        return was

    def num_keys(self) -> int:
        """The number of keys."""
        number: int = self._ask("number")
        return number

    def has_extended_api(self) -> bool:
        """No append, multi_get or multi_set."""
        return False

    def _found(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        values: list[bytes] | None = self._ask("found", keys, timeout.total_seconds())
        if values is None:
            raise dist.DistStoreError(
                f"{', '.join(keys)} did not come within {timeout.total_seconds():.0f} s"
            )
        return values

    def _ask(self, method: str, *arguments: object) -> Any:
        import ray

        return ray.get(getattr(self._board, method).remote(*arguments))


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
