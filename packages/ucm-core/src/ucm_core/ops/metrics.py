"""Counters, and one histogram, in the default Prometheus registry; every name begins with ``ucm_``.

They only grow. Labels are few and bounded: ``row`` is a row's name, ``tier`` is ``ring``, ``file`` or
``absent``, ``operation`` is ``load``, ``save``, ``prefetch``, ``write`` or ``close``, ``reason`` is the
lower-case name of a `ucm_core.ResultCode` or of a cause, ``where`` names a border at which something
unexpected was caught, ``when`` is ``layer`` or ``step end``, ``result`` the
lower-case name of an adapter's outcome.
Tokens are counted once per request, when it is over (`ucm_core.coordinator.accounts.TokenAccount`).
"""

from __future__ import annotations

from prometheus_client import Counter, Histogram

LOOKUPS = Counter("ucm_lookups_total", "Objects asked for, by where they were found", ["row", "tier"])
REQUESTS = Counter("ucm_requests_total", "Requests that are over; a preempted one counts again")
PROMPT_TOKENS = Counter("ucm_prompt_tokens_total", "Tokens of all requests: local + hit - failed + computed")
LOCAL_TOKENS = Counter("ucm_local_tokens_total", "Tokens that the engine held itself")
QUERIED_TOKENS = Counter("ucm_queried_tokens_total", "Tokens that the engine did not hold itself")
HIT_TOKENS = Counter("ucm_hit_tokens_total", "Tokens promised, by verdicts that the engine took up")
FAILED_TOKENS = Counter("ucm_failed_tokens_total", "Tokens promised and not delivered")
COMPUTED_TOKENS = Counter("ucm_computed_tokens_total", "Tokens left to compute")
OBJECTS_SAVED = Counter("ucm_objects_saved_total", "Objects that reached a tier", ["row", "tier"])
OBJECTS_LOADED = Counter(
    "ucm_objects_loaded_total", "Objects delivered, by the tier they came from", ["row", "tier"]
)
OBJECTS_FAILED = Counter(
    "ucm_objects_failed_total", "Objects not delivered or not kept", ["operation", "reason"]
)
OBJECTS_DROPPED = Counter("ucm_objects_dropped_total", "Objects removed from the medium", ["reason"])
WRITE_RETRIES = Counter("ucm_write_retries_total", "Objects whose file was written again after an error")
ERRORS = Counter("ucm_errors_total", "Failures caught at a border", ["where"])
LAYER_WAIT = Histogram(
    "ucm_layer_wait_seconds",
    "Time that one layer's hook waited for loads",
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
)
LAYERS_UNSEEN = Counter(
    "ucm_layers_unseen_total", "Layers with something to load or to save whose hook did not come in a step"
)
UNITS_SAVED = Counter(
    "ucm_units_saved_total",
    "Units handed over for saving, after their layer or at the end of the step",
    ["when"],
)
LAYER_SAVES = Counter(
    "ucm_layer_saves_total",
    "Requests of a step of SGLang's that fill whole pages, by what became of saving them layer by layer",
    ["result"],
)
