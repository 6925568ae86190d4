"""Ends launches at random instants and compares the resumed curves with an uninterrupted one.

Usage: kill_soak.py PLAN [PLAN ...] --folder NEW [--ends 20] [--steps 60] [--checkpoint-every 4]
    [--how launch,worker,interrupt] [--seed 0]

Resumptions take the plans in turn, so that several plans of one training show that a checkpoint of
one is continued by another. Curves must be equal to the last bit; so the plans have to sum in one
order (the same devices, micro-batches and accumulation groups).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.launcher.soak import main

main()
