# SPDX-License-Identifier: Apache-2.0
"""Which slot of the tree table belongs to which request."""

from collections.abc import Sequence

import torch

from vllm_echo.core.tree import TreeTable


class SlotPool:
    """A request keeps its slot until vLLM forgets it. Preempted requests keep theirs too,
    so there can be more of them than a batch holds: the table then grows."""

    def __init__(self, table: TreeTable):
        self._table = table
        self._slots: dict[str, int] = {}
        self._free = list(range(table.num_slots))

    def of(self, req_ids: Sequence[str]) -> torch.Tensor:
        """[R] int64, one slot per request; new requests get a cleared one."""
        return torch.tensor([self._slot(req_id) for req_id in req_ids], dtype=torch.int64)

    def _slot(self, req_id: str) -> int:
        if req_id not in self._slots:
            if not self._free:
                self._free.extend(self._table.grow())
            slot = self._free.pop()
            self._table.clear(torch.tensor([slot]))
            self._slots[req_id] = slot
        return self._slots[req_id]

    def release(self, req_id: str) -> None:
        """Give the slot back; a request that never ran has none."""
        slot = self._slots.pop(req_id, None)
        if slot is not None:
            self._free.append(slot)
