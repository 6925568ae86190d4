"""Documents that are kept apart, in chunks of a sequence's tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def documents_in_chunks(begins: Tensor, chunk: int, missing: int) -> tuple[Tensor, Tensor]:
    """Which tokens of its chunk are before a token's document, [b, chunks, chunk, chunk]; and
    whether all before its chunk are, [b, chunks, chunk, 1].

    `begins`: the first token of each token's document, int32 [b, s]. `missing`: tokens that fill up
    the last chunk.
    """
    first = torch.unflatten(F.pad(begins, (0, missing)), -1, (-1, chunk)).unsqueeze(-1)
    places = torch.arange(first.shape[1] * chunk, device=begins.device).view(-1, chunk, 1)
    return places.mT < first, first >= places[:, :1]
