"""Something wrong under right names: who is served it computes something else, or did not use it."""

from pathlib import Path

from e2e.shared import Shared
from ucm_core import Cache, CacheConfig, RequestIdentity
from ucm_core.spec.checkpoint import WeightDigester
from ucm_core.spec.model import Resolved, read_model


def mislead(root: Path, checkpoint: Path, shared: Shared) -> dict[str, str]:
    """Store the first prompt again for each row, with the layers of that row in reverse order.

    The first prompt is on `root`. Row -> the salt under which it now is there too.
    """
    resolved = Resolved(compute_dtype=shared.dtype, kv_dtype=shared.dtype, grain_tokens=shared.page_tokens)
    model = read_model(checkpoint, resolved).with_weights(WeightDigester(root.parent / "digests"))
    config = CacheConfig(root=root, ring_bytes=0, grain_tokens=shared.page_tokens)
    salts = {row.name: f"{row.name} reversed" for row in model.table.rows}
    with Cache.open(config, model.table, identity=model.identity) as cache:
        for row, salt in salts.items():
            _store_reversed(cache, shared.first[0].tokens, row=row, salt=salt)
    return salts


def _store_reversed(cache: Cache, tokens: tuple[int, ...], *, row: str, salt: str) -> None:
    chain = cache.chain(tokens)
    loaded = cache.load(chain, cache.resolve(chain))
    assert loaded.resume_tokens == (len(tokens) - 1) // chain.grain_tokens * chain.grain_tokens
    payloads = {**loaded.payloads, row: loaded.payloads[row][:, ::-1]}
    begins = {
        name: loaded.resume_tokens // chain.grain_tokens - len(blocks) for name, blocks in payloads.items()
    }
    target = cache.chain(tokens, RequestIdentity(cache_salt=salt))
    assert cache.save(target, payloads, first_block=begins).wait_durable()
