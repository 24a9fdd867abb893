"""The public cases of identity, units and alignment (C-01 .. C-16, C-31), read from their shared form."""

import hashlib
import itertools
import json
from array import array
from pathlib import Path

import numpy as np
import pytest

from ucm_core.errors import IdentityError, SpecError
from ucm_core.spec.identity import ModelIdentity, canonical_json
from ucm_core.spec.keys import LoraIdentity, MediaItem, PrefixChain, RequestIdentity
from ucm_core.spec.table import MAX_ALIGNMENT_TOKENS, alignment_of
from ucm_core.spec.units import stage_units
from ucm_core.store.names import slug

CASES = json.loads((Path(__file__).parent / "data" / "cases-identity.json").read_text())["cases"]


def cases(check, form=None):
    chosen = [case for case in CASES if case["check"] == check and case["input"].get("form") == form]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


def tokens_of(spans):
    def expand(span):
        if isinstance(span, int):
            return [span]
        return range(*span["range"]) if "range" in span else [span["repeat"]] * span["count"]

    return [token for span in spans for token in expand(span)]


def identity_of(fields):
    lora = fields.get("lora")
    if isinstance(lora, str):
        # The case gives only a name; its content stands for itself.
        lora = {"name": lora, "digest": hashlib.sha256(lora.encode()).hexdigest()}
    if lora is not None:
        digest = None if lora["digest"] == "unknown" else lora["digest"]
        lora = LoraIdentity(lora["name"], digest)
    return RequestIdentity(lora=lora, cache_salt=fields.get("salt"))


def chain_of(grain, chain):
    media = [
        MediaItem(bytes.fromhex(item["digest"]), item["begin"], item["end"])
        for item in chain.get("media", ())
    ]
    made = PrefixChain(identity_of(chain["identity"]), grain_tokens=grain, media=media)
    made.extend(tokens_of(chain["tokens"]))
    return [row.tobytes() for row in made.digests]


def check_classes(values, expected):
    """Values of one class are equal, all others differ pairwise; None stands for a refusal."""
    refused = {index for index, value in enumerate(values) if value is None}
    assert set(expected.get("refused", [])) <= refused
    assert refused <= set(expected.get("may_refuse", [])) | set(expected.get("refused", []))
    for i, j in itertools.combinations(sorted(set(range(len(values))) - refused), 2):
        together = any(i in group and j in group for group in expected["equal"])
        assert (values[i] == values[j]) == together, (i, j)


@cases("keys", "chains")
def test_chains_share_exactly_the_grains_they_should(case):
    chains = [chain_of(case["input"]["grain"], chain) for chain in case["input"]["chains"]]
    for i, j, shared in case["expected"]["shared_grains"]:
        assert chains[i][:shared] == chains[j][:shared]
        assert not set(chains[i][shared:]) & set(chains[j][shared:])
    for chain, distinct in zip(chains, case["expected"].get("distinct_grains", []), strict=False):
        assert len(set(chain)) == distinct


@cases("keys", "requests")
def test_requests_are_equal_only_where_they_should_be(case):
    def seed(fields):
        try:
            identity = identity_of(fields)
        except IdentityError:
            return None
        return identity.seed if identity.cacheable else None

    check_classes([seed(fields) for fields in case["input"]["identities"]], case["expected"])


def model_identity(fields):
    weights = None if fields["weights"] == "unknown" else fields["weights"]
    return ModelIdentity(
        config=canonical_json({"model": fields["model"], "rope": fields["rope"]}),
        weights=weights,
        revision=fields["revision"],
        compute_dtype=fields["compute_dtype"],
        kv_dtype=fields["kv_dtype"],
        quantisation=canonical_json(fields["quantisation"]),
        layout=fields["layout"],
        table="00" * 32,
    )


@cases("keys", "namespaces")
def test_namespaces_are_equal_only_where_they_should_be(case):
    def digest(variant):
        try:
            return model_identity(case["input"]["base"] | variant).digest
        except IdentityError:
            return None

    check_classes([digest(variant) for variant in [{}, *case["input"]["variants"]]], case["expected"])


@cases("keys", "names")
def test_names_become_different_bounded_components(case):
    components = [slug(name) for name in case["input"]["names"]]
    check_classes([component.lower() for component in components], case["expected"])
    assert max(len(component.encode()) for component in components) <= case["expected"]["max_bytes"]
    assert not any("/" in component or component in {".", ".."} for component in components)


CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "array_q": lambda ids: array("q", ids),
    "numpy_int32": lambda ids: np.array(ids, np.int32),
    "numpy_int64": lambda ids: np.array(ids, np.int64),
}


@cases("keys", "containers")
def test_containers_do_not_matter(case):
    def digests(container):
        chain = PrefixChain(grain_tokens=case["input"]["grain"])
        chain.extend(container(case["input"]["tokens"]))
        return chain.digests.tobytes()

    # A torch tensor is asked through numpy(); the double in test_keys.py stands for it.
    named = [CONTAINERS[name] for name in case["input"]["containers"] if name != "torch_int64"]
    assert len({digests(container) for container in named}) == 1


@cases("units")
def test_units_follow_the_real_partition(case):
    stages = stage_units(case["input"]["row_layers"], case["input"]["partition"])
    assert {name: [getattr(stage, name) for stage in stages] for name in case["expected"]} == case["expected"]


@cases("alignment")
def test_alignment_is_exact_or_refused_with_the_limit(case):
    expected = case["expected"]["lcm"]
    if expected <= MAX_ALIGNMENT_TOKENS:
        assert alignment_of(case["input"]["sizes"]) == expected
    else:
        with pytest.raises(SpecError, match=rf"{expected} .*{MAX_ALIGNMENT_TOKENS}"):
            alignment_of(case["input"]["sizes"])
