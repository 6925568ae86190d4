"""The collector of cycles, told to look where and when there is something to find."""

from __future__ import annotations

import gc


def spare() -> None:
    """Let it pass over what is there by now, and look a hundredth as often.

    Beside torch, Ray and five thousand collected tests it takes a third of a plan's time. In a rank
    that is forked it would copy the server's pages to look at them.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
