"""Without a GPU the kernels run in Triton's interpreter, asked for before they load."""

import os
from importlib.util import find_spec

if find_spec("torch") and find_spec("triton"):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
