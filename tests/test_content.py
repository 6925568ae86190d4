from __future__ import annotations

from bigplan.content import Content, HeldContent, Holds
from bigplan.placement import Share


def test_contents_name_their_layer_part_and_micro_batch() -> None:
    state, kept = Content(Holds.STATE, 3, Share.NVME, 2), Content(Holds.ACTIVATIONS, 0)
    assert f"{state}" == "optimizer state of layer 3 (nvme, chunk 2)"
    assert f"{Content(Holds.CLIP)}" == "clip factor"
    assert [f"{HeldContent(kept, number)}" for number in (0, None)] == [
        "activations of layer 0, micro-batch 0",
        "activations of layer 0",
    ]
