"""1,000 requests each under speculative decoding, PP, CP and all three: every byte read is compared.

Ranks keep what they save in rings alone, so that the processor's time goes to the engine; restarts and files
have tests of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from openings import SMALL, Crowd, engine

from ucm_core.spec.segments import Parallelism
from ucm_core.testing.engine.engine import EngineShape
from ucm_core.testing.engine.scheduler import Feed

REQUESTS = 1000
PLAIN = Feed(batch=16, chunk_tokens=32)
SPECULATIVE = Feed(batch=16, chunk_tokens=32, drafts=3)
SHAPES = {
    "speculative": EngineShape(feed=SPECULATIVE),
    "pipeline stages": EngineShape(Parallelism(partition=(5, 3)), PLAIN),
    "context": EngineShape(Parallelism(prefill_context=2), PLAIN),
    "all three": EngineShape(Parallelism(partition=(3, 5), prefill_context=2), SPECULATIVE),
}


@pytest.mark.parametrize("name", SHAPES)
def test_no_byte_is_wrong(tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    requests = REQUESTS * (10 if request.config.getoption("--long") else 1)
    crowd, shape = Crowd(tokens=40), SHAPES[name]
    in_ring_only = {} if name == "speculative" else {"disk_bytes": 0, "ring_bytes": 16 << 20}
    with engine(tmp_path, SMALL, shape, **in_ring_only) as engine_:
        crowd.submit(engine_, requests, output_tokens=4)
        counts = engine_.run()
        assert counts.finished == requests
        assert counts.resumed_tokens > 8 * requests
        assert counts.rewound == 0
        assert engine_.entries_read() > 100 * requests
        assert (counts.rejected > 0) == bool(shape.feed.drafts)
