"""The attributes with which our hooks find each other on vLLM's objects.

Owns: the names. All of them are plain attributes, which survive vLLM's pickles and stay out of
its compile-cache key.
"""

from __future__ import annotations

ENABLED = "kvadmit_enabled"
"""On a VllmConfig: its engine runs with kvadmit."""
FITS_LENGTH = "kvadmit_fits_length"
"""On a VllmConfig: the size was not the user's, so a max_model_len beyond it is ours to lower."""
RUNTIME = "kvadmit_rt"
"""On a VllmConfig and its SchedulerConfig: what leads to the coordinator."""
PLAN = "kvadmit_plan"
"""On every KVCacheConfig: the extents, for the workers."""
SIDE = "kvadmit_side"
"""On a worker whose KV buffer is ours."""
STEP = "kvadmit_step"
"""On every SchedulerOutput: the number of the last step that could name a block."""
