"""Split-KV attention on Vulkan whose bits never change. See README.md."""

from . import errors, reference
from .cache.kv_cache import KVCache
from .cache.pages import CapacityError, StepError
from .cache.sequence import Sequence
from .canonical.partial import PartialState, fold
from .canonical.reference import merge_state, merge_states
from .decode.attention import Attention
from .decode.one_shot import attention
from .decode.pending import PendingAttention
from .distributed.attention import ShardedAttention
from .distributed.cache import ShardedKVCache
from .distributed.fold import Fold
from .distributed.ranks import RankError, Ranks
from .distributed.sequence import ShardedSequence
from .errors import ZincAttnError
from .planning.splits import SplitPlan, plan_splits
from .runtime.device import Device, list_devices
from .runtime.protocol import DeviceInfo
from .shapes import AttnShape

__version__ = "0.2.0"  # the only place: --version, manifests, records and the wheel take it from here
__all__ = [
    "Attention", "AttnShape", "CapacityError", "Device", "DeviceInfo", "Fold", "KVCache", "PartialState",
    "PendingAttention", "RankError", "Ranks", "Sequence", "ShardedAttention", "ShardedKVCache", "ShardedSequence",
    "SplitPlan", "StepError", "ZincAttnError", "attention", "errors", "fold", "list_devices", "merge_state",
    "merge_states", "plan_splits", "reference",
]  # fmt: skip
