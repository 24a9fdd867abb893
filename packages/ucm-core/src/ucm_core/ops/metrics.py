"""Counters in the default Prometheus registry; every name begins with ``ucm_``.

They only grow. Labels are few and bounded: ``row`` is a row's name, ``tier`` is ``ring``, ``file`` or
``absent``, ``operation`` is ``load``, ``save``, ``prefetch`` or ``write``, ``reason`` is the lower-case name
of a `ucm_core.ResultCode` or of a cause, ``where`` names a border at which something unexpected was caught.
"""

from __future__ import annotations

from prometheus_client import Counter

LOOKUPS = Counter("ucm_lookups_total", "Objects asked for, by where they were found", ["row", "tier"])
HIT_TOKENS = Counter("ucm_hit_tokens_total", "Prompt tokens that verdicts promised to serve")
OBJECTS_SAVED = Counter("ucm_objects_saved_total", "Objects that reached a tier", ["row", "tier"])
OBJECTS_LOADED = Counter(
    "ucm_objects_loaded_total", "Objects delivered, by the tier they came from", ["row", "tier"]
)
OBJECTS_FAILED = Counter(
    "ucm_objects_failed_total", "Objects not delivered or not kept", ["operation", "reason"]
)
OBJECTS_DROPPED = Counter("ucm_objects_dropped_total", "Objects removed from the medium", ["reason"])
ERRORS = Counter("ucm_errors_total", "Failures caught at a border", ["where"])
