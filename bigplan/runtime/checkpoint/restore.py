"""A checkpoint into a rank's memory, wherever its plan wants the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from bigplan.errors import InputError
from bigplan.plan import Plan
from bigplan.runtime.checkpoint.coded import fill_coded
from bigplan.runtime.checkpoint.folder import FoundCheckpoint
from bigplan.runtime.checkpoint.layout import (
    Image,
    parameter_images,
    piece_spans,
    state_images,
    state_kinds,
)
from bigplan.runtime.checkpoint.reading import Reader
from bigplan.runtime.context import Context
from bigplan.runtime.manifest import ELEMENT, Kind
from bigplan.runtime.memory.moments import StoredState, bytes_view
from bigplan.runtime.memory.pieces import Box
from bigplan.runtime.weights.homes import passage
from bigplan.spec.training import FREE_IN_A_RUN

SECOND: Kind = "exp_avg_sq"
NAMED = {"name": True, "source": True}  # of a model: what describes it and decides nothing
# Of a training: what the user may change on the way. Files move, runs grow longer, and moments are
# converted.
FREE: Mapping[str, bool | set[str]] = {
    **dict.fromkeys((*FREE_IN_A_RUN, "steps", "weights"), True),
    "optimizer": {"moments"},
}


def check_same(found: FoundCheckpoint, plan: Plan, data: str, frozen: str = "") -> None:
    """Raise InputError where the checkpoint is another model's, another training's or of other
    data or frozen weights; `data` and `frozen`: their fingerprints now, as Manifest has them.
    """
    stored = found.manifest
    for what, theirs, ours, free in (
        ("model", stored.model, plan.model, NAMED),
        ("training", stored.training, plan.training, FREE),
    ):
        old, new = (spec.model_dump(mode="json", exclude=dict(free)) for spec in (theirs, ours))
        differing = [
            f"{key} {old.get(key)} there and {new.get(key)} here"
            for key in old | new
            if old.get(key) != new.get(key)
        ]
        if differing:
            raise InputError(
                f"the checkpoint {found.path} is of another {what}: {'; '.join(differing)}; resume "
                "with the same, or export its weights and start anew from them"
            )
    if stored.data and stored.data != data:
        raise InputError(
            f"the checkpoint {found.path} was trained on other data than {plan.training.data} now "
            f"is (fingerprint {stored.data} then, {data} now), and its next steps would not follow "
            "from it; put the data back, name its new place with --data, or export the weights and "
            "start anew from them"
        )
    check_frozen(found, plan.training.weights, frozen)


def check_frozen(found: FoundCheckpoint, weights: str | None, frozen: str) -> None:
    """Raise InputError where adapters were trained beside other weights than this folder's."""
    stored = found.manifest.frozen
    if stored and stored != frozen:
        raise InputError(
            f"the adapters in {found.path} were trained beside other weights than {weights} now "
            f"holds (fingerprint {stored} then, {frozen or 'none'} now); put the folder back, or "
            "name its new place with --weights"
        )


def restore(context: Context, found: FoundCheckpoint) -> None:
    """Fill every trained layer's parameters and optimizer state. Raises CheckpointError."""
    stage = context.memory.place(("stage.c", 0))
    kind: Kind = "master" if context.graph.sizes.master else "weights"
    apart = context.groups.apart
    with Reader(found.path, found.manifest, stage, apart.bring if apart else None) as reader:
        for layer in context.trained:
            pieces = [boxes for _, _, boxes in context.rows[layer].state if boxes]
            for image, boxes in zip(state_images(context, layer), pieces, strict=False):
                _fill(context, reader, layer, (image,), torch.float32, boxes)
            images = parameter_images(context, layer, kind)
            _fill(context, reader, layer, images, context.parameter_dtype)


def _fill(
    context: Context,
    reader: Reader,
    layer: int,
    images: Sequence[Image],
    dtype: torch.dtype,
    piece: Sequence[Box] = (),
) -> None:
    """Fill images of one entry; `dtype`: of what they have in fp32; `piece`: whose state it is."""
    if not images:
        return
    memory, key, each = context.memory, images[0].key, dtype.itemsize
    place = memory.place(passage(context, layer, key))
    for image in images:
        values = place[image.offset // ELEMENT * each :]
        for part in image.filling:
            values[part.start // ELEMENT * each : part.stop // ELEMENT * each] = 0
        for span in image.spans:
            if span.scaled is None:
                kind = torch.bfloat16 if span.dtype == "BF16" else dtype
                found = values[span.start * kind.itemsize : span.stop * kind.itemsize].view(kind)
                reader.read(layer, span.kind, span.rectangle, found)
                if span.kind == SECOND and reader.has_roots:
                    found.mul_(found)
        if any(span.scaled for span in image.spans):
            _fill_coded(context, reader, layer, values, piece)
    if memory.on_disk(key):
        memory.write(key, place)


def _fill_coded(
    context: Context, reader: Reader, layer: int, place: Tensor, piece: Sequence[Box]
) -> None:
    """The moments of a piece in 8 bits."""
    optimizer, master = context.training.optimizer, context.graph.sizes.master
    elements = sum(box.count for box in piece)
    state = StoredState.of(bytes_view(place), elements, optimizer, master=master)
    kinds, read = state_kinds(context), partial(reader.read, layer)
    for kind, codes, scales in zip(kinds, state.moments, state.scales, strict=False):
        spans = tuple(piece_spans(context, layer, piece, kind))
        rooted = kind != SECOND or reader.has_roots
        fill_coded(read, spans, codes, scales, context.device, rooted=rooted)
