"""A cache of keys and values that lies in blocks: operators that write it in place and that read it.

Functions here, `torch.ops.paged_cache.*` in a graph.
"""

from paged_cache._common import LIBRARIES as LIBRARIES
from paged_cache.paged_attention import paged_attention as paged_attention
from paged_cache.reshape_and_cache import reshape_and_cache as reshape_and_cache
