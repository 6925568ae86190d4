"""A checkpoint into a rank's memory, wherever its plan wants the state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigplan.errors import InputError
from bigplan.plan import Plan
from bigplan.runtime.checkpoint.folder import FoundCheckpoint
from bigplan.runtime.checkpoint.layout import Image, parameter_images, state_images
from bigplan.runtime.checkpoint.reading import Reader
from bigplan.runtime.context import Context
from bigplan.runtime.homes import passage
from bigplan.runtime.manifest import ELEMENT, Kind
from bigplan.spec.training import FREE_IN_A_RUN

NAMED = {"name", "source"}  # of a model: what describes it and decides nothing
# Of a training: what the user may change on the way. Files move, runs grow longer.
FREE = {*FREE_IN_A_RUN, "steps", "weights"}


def check_same(found: FoundCheckpoint, plan: Plan, data: str) -> None:
    """Raise InputError where the checkpoint is another model's, another training's or of other
    data; `data`: its fingerprint now (Tokens.fingerprint).
    """
    stored = found.manifest
    for what, theirs, ours, free in (
        ("model", stored.model, plan.model, NAMED),
        ("training", stored.training, plan.training, FREE),
    ):
        old, new = (spec.model_dump(mode="json", exclude=free) for spec in (theirs, ours))
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


def restore(context: Context, found: FoundCheckpoint) -> None:
    """Fill every trained layer's parameters and optimizer state. Raises CheckpointError."""
    stage = context.memory.place(("stage.c", 0))
    kind: Kind = "master" if context.graph.sizes.master else "weights"
    apart = context.groups.apart
    with Reader(found.path, found.manifest, stage, apart.bring if apart else None) as reader:
        for layer in context.trained:
            for image in state_images(context, layer):
                _fill(context, reader, layer, (image,), torch.float32)
            images = parameter_images(context, layer, kind)
            _fill(context, reader, layer, images, context.parameter_dtype)


def _fill(
    context: Context, reader: Reader, layer: int, images: Sequence[Image], dtype: torch.dtype
) -> None:
    """Fill images of one entry."""
    if not images:
        return
    memory, key = context.memory, images[0].key
    place = memory.place(passage(context, layer, key))
    for image in images:
        first = image.offset // ELEMENT * dtype.itemsize
        values = place[first : first + image.elements * dtype.itemsize].view(dtype)
        for part in image.filling:
            values[part.start : part.stop] = 0
        for span in image.spans:
            reader.read(layer, span.kind, span.rectangle, values[span.start : span.stop])
    if memory.on_disk(key):
        memory.write(key, place)
