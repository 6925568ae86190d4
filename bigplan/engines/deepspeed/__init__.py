"""DeepSpeed behind the engines' interface; nothing here imports it."""

from bigplan.engines.deepspeed.engine import DeepSpeed

__all__ = ["DeepSpeed"]
