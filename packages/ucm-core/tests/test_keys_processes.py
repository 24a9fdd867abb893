"""Keys come from bytes: fresh interpreters, hash seeds and start methods have no influence (case C-07)."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.keys import LoraIdentity, PrefixChain, RequestIdentity, object_keys, row_seed

IDS = [1, 2, 300, 70000] * 16
GOLDEN = [
    "ba16f210c0fa9c49c830cdc3142c2e2295ca291d14f327b9b73644799aa28e72",
    "12bfa961e0f0d110af2db425a4790c255b3e6ebc01972abead56896a9d4b71c4",
    "76ccf11879c33059da3acbd83e47c99fdfec934d49e9fac0b3a671bea7fd94b8",
    "21c77b76ab989aa81a1dd770e6bc8f40674805f9732983d63e7732819e6bd736",
]

SCRIPT = """
from test_keys_processes import fingerprint
print(fingerprint())
"""


def fingerprint():
    """Everything that names an object, in one line."""
    identity = RequestIdentity(LoraIdentity("fr", "5e" * 32), cache_salt="t", extra_key="k")
    model = ModelIdentity(
        config='{"b": {"y": 1, "x": 2.0}, "a": [1]}', weights="5a" * 32, revision=None,
        compute_dtype="bfloat16", kv_dtype="bfloat16", table="00" * 32,
    )  # fmt: skip
    lines = [model.digest.hex(), model.base_digest.hex()]
    for who in (RequestIdentity(), identity):
        chain = PrefixChain(who, grain_tokens=16)
        chain.extend(IDS)
        lines.append(object_keys(row_seed(b"n" * 32, "full"), chain.digests).tobytes().hex())
    return " ".join(lines)


def send_fingerprint(queue):
    queue.put(fingerprint())


@pytest.mark.parametrize("hash_seed", [None, "0", "1", "random"])
def test_fresh_interpreters_agree(hash_seed):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == fingerprint()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_start_methods_agree(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=send_fingerprint, args=(queue,))
    process.start()
    assert queue.get() == fingerprint()
    process.join()
    assert process.exitcode == 0


def test_the_chain_of_the_case_has_its_golden_digests():
    chain = PrefixChain(grain_tokens=16)
    chain.extend(IDS)
    assert [row.tobytes().hex() for row in chain.digests] == GOLDEN
