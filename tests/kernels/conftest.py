"""Without a GPU the kernels run in Triton's interpreter, asked for before they load."""

import os
from importlib.util import find_spec

if find_spec("torch") and find_spec("triton"):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

        # Else it does every sum and product of whole numbers again in 64 bits, for an assertion
        # that it leaves out: a third of these tests' time.
        assert not interpreter_builder.options.debug
        interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
