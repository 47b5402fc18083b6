"""Split-KV attention on Vulkan whose bits never change. See README.md."""

from . import errors, reference
from .attention import attention
from .cache import KVCache, Sequence
from .decode import Attention
from .device import Device, list_devices
from .errors import ZincAttnError
from .pages import CapacityError, StepError
from .planner import SplitPlan, plan_splits
from .reference import PartialState, fold, merge_state, merge_states
from .runtime import DeviceInfo
from .shapes import AttnShape
from .sharded import Fold, RankError, Ranks, ShardedAttention, ShardedKVCache, ShardedSequence

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "AttnShape",
    "CapacityError",
    "Device",
    "DeviceInfo",
    "Fold",
    "KVCache",
    "PartialState",
    "RankError",
    "Ranks",
    "Sequence",
    "ShardedAttention",
    "ShardedKVCache",
    "ShardedSequence",
    "SplitPlan",
    "StepError",
    "ZincAttnError",
    "attention",
    "errors",
    "fold",
    "list_devices",
    "merge_state",
    "merge_states",
    "plan_splits",
    "reference",
]
