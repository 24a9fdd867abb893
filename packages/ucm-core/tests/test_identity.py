"""Model identity: by value, never by spelling; unknown equals nothing."""

import dataclasses
import hashlib
import json

import pytest

from ucm_core.errors import IdentityError
from ucm_core.spec import identity as identity_module
from ucm_core.spec.identity import CANONICAL_LAYOUT, ModelIdentity, canonical_json

CONFIG = {"rope_theta": 10000, "layers": [1, 2], "scale": {"factor": 4, "on": True}}
BASE = ModelIdentity(
    config=canonical_json(CONFIG),
    weights="ab" * 32,
    revision=None,
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    state_dtypes=(("conv", "bfloat16"), ("ssm", "float32")),
    quantisation=canonical_json({"method": "awq", "group_size": 64}),
    run_options="null",
    layout=CANONICAL_LAYOUT,
    grain_tokens=64,
    table="cd" * 32,
    format_version=1,
)

CHANGES = {
    "config": canonical_json(CONFIG | {"rope_theta": 500000}),
    "weights": "ac" * 32,
    "revision": "r7",
    "compute_dtype": "float32",
    "kv_dtype": "float8_e4m3fn",
    "state_dtypes": (("conv", "float32"), ("ssm", "float32")),
    "quantisation": canonical_json({"method": "awq", "group_size": 128}),
    "run_options": canonical_json({"sparse_prefill": 0.5}),
    "layout": "engine-native-1",
    "grain_tokens": 128,
    "table": "ce" * 32,
    "format_version": 2,
    "generation": 1,
    "private_token": "x",
}


def changed(**fields):
    return dataclasses.replace(BASE, **fields)


def test_the_changes_cover_every_field():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(ModelIdentity)}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_digest_and_namespace_and_is_named(field):
    other = changed(**{field: CHANGES[field]})
    assert other.digest != BASE.digest
    assert other.namespace != BASE.namespace
    assert not BASE.matches(other)
    assert BASE.first_difference(other).startswith(field)


def test_the_namespace_is_the_beginning_of_the_digest():
    assert len(BASE.digest) == 32
    assert BASE.namespace == BASE.digest.hex()[:32]


@pytest.mark.parametrize("field", CHANGES)
def test_the_base_digest_leaves_out_weights_and_generation_only(field):
    same = changed(**{field: CHANGES[field]}).base_digest == BASE.base_digest
    assert same == (field in {"weights", "generation", "private_token"})


def test_spelling_does_not_matter():
    text = json.dumps({"scale": {"on": True, "factor": 4.0}, "layers": [1.0, 2], "rope_theta": 1e4}, indent=2)
    other = changed(config=text, state_dtypes=(("ssm", "float32"), ("conv", "bfloat16")))
    assert other == BASE
    assert other.digest == BASE.digest
    assert BASE.matches(other)


@pytest.mark.parametrize(
    ("key", "value"), [("layers", [2, 1]), ("rope_theta", "10000"), ("scale", {"factor": 4, "on": 1})]
)
def test_values_types_and_list_order_matter(key, value):
    other = changed(config=canonical_json(CONFIG | {key: value}))
    assert other.digest != BASE.digest


def test_unknown_weights_match_nothing_not_even_themselves():
    unknown = changed(weights=None)
    assert BASE.known
    assert not unknown.known
    assert not unknown.matches(unknown)
    assert not unknown.matches(BASE)
    assert not BASE.matches(unknown)
    assert unknown.digest != BASE.digest
    with pytest.raises(IdentityError, match="weights are unknown"):
        _ = unknown.namespace


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_dtype": "auto"}, "kv_dtype is 'auto'; give the resolved type"),
        ({"compute_dtype": "auto"}, "compute_dtype is 'auto'"),
        ({"compute_dtype": ""}, "compute_dtype is ''"),
        ({"state_dtypes": (("ssm", "auto"),)}, "ssm is 'auto'"),
        ({"layout": None}, "layout is None"),
        ({"layout": ""}, "layout is ''"),
        ({"weights": ""}, "weights is ''"),
        ({"weights": "unknown"}, "weights is 'unknown'"),
        ({"weights": "AB" * 32}, "lower-case"),
        ({"table": ""}, "table is ''"),
        ({"config": "{"}, "config is not JSON text"),
        ({"quantisation": "none"}, "quantisation is not JSON text"),
        ({"config": "[" * 5000}, "config is not JSON text"),
        ({"table": None}, "table is None"),
        ({"state_dtypes": 5}, "state_dtypes are 5"),
        ({"state_dtypes": (("ssm",),)}, "give pairs"),
        ({"state_dtypes": ((1, "float32"),)}, "a name in state_dtypes is 1, a int; give text"),
        ({"weights": "sampled:"}, "weights is ''"),
        ({"weights": "sampled:sampled:" + "ab" * 32}, "weights is"),
        ({"weights": "guessed:" + "ab" * 32}, "weights is"),
        ({"weights": "ab " * 32}, "weights is"),
        ({"revision": 7}, "revision is 7, a int"),
        ({"revision": False}, "revision is False"),
        ({"private_token": None}, "private_token is None"),
        ({"grain_tokens": 0}, "grain_tokens is 0"),
        ({"grain_tokens": 64.0}, "grain_tokens is 64.0"),
        ({"generation": -1}, "generation is -1"),
        ({"generation": True}, "generation is True"),
        ({"format_version": None}, "format_version is None"),
    ],
)
def test_vague_fields_are_refused(fields, message):
    with pytest.raises(IdentityError, match=message):
        changed(**fields)


def test_samples_of_weights_never_equal_all_of_them():
    sampled = changed(weights="sampled:" + BASE.weights)
    assert sampled.known
    assert not sampled.matches(BASE)
    assert sampled.namespace != BASE.namespace
    assert sampled.manifest()["weights"].startswith("sampled:")


def test_two_unknowns_are_not_equal_whatever_else_they_have_in_common():
    one, other = (changed(weights=None, revision=revision) for revision in (None, "r7"))
    pairs = [(one, one), (one, other), (one, BASE), (BASE, one), (other, other)]
    assert not any(left.matches(right) for left, right in pairs)


def test_the_digest_is_made_once(monkeypatch):
    fresh = changed(revision="once")
    first = fresh.digest
    monkeypatch.setattr(identity_module, "digest_of", None)
    assert fresh.digest is first
    assert fresh.namespace == first.hex()[:32]


# -- golden: what is on disk is found again by every later version, or FORMAT_VERSION is raised


def framed(kind, body):
    return kind + len(body).to_bytes(8, "little") + body


def slow_bytes(value):
    """The encoding as the format's description says it, one kind of value a line."""
    if isinstance(value, bool) or value is None:
        return {None: b"n", True: b"t", False: b"f"}[value]
    if isinstance(value, str):
        return framed(b"s", value.encode())
    if isinstance(value, int):
        return framed(b"i", b"%d" % value)
    count = len(value).to_bytes(8, "little")
    if isinstance(value, list):
        return b"l" + count + b"".join(slow_bytes(item) for item in value)
    pairs = sorted((slow_bytes(key), slow_bytes(item)) for key, item in value.items())
    return b"d" + count + b"".join(key + item for key, item in pairs)


def test_the_digest_is_blake2b_over_the_framed_fields():
    manifest = BASE.manifest()
    fields = manifest | {
        name: canonical_json(manifest[name]) for name in ("config", "quantisation", "run_options")
    }
    body = slow_bytes(["ucm-model-identity-1", fields])
    assert BASE.digest == hashlib.blake2b(body, digest_size=32).digest()
    assert BASE.digest.hex() == "64b5efb9bffe64b17e495bb4a367b7ab94a1503be1d77156115eb8c7f8bfeb20"


# -- two halves of one engine (case C-15)


def test_what_changes_after_an_identity_was_made_does_not_change_it():
    rope = {"rope_type": "yarn", "factor": 4}
    config = {"rope": rope, "block_size": 16}
    made = changed(config=canonical_json(config))
    before = made.digest
    rope["factor"] = 8
    config["block_size"] = 32
    assert made.digest == before
    late = changed(config=canonical_json(config))
    with pytest.raises(IdentityError, match=r"differ first in config\.block_size: 16 != 32") as error:
        made.require_same_model(late, halves=("scheduler", "worker"))
    assert f"{made.digest.hex()} (scheduler) and {late.digest.hex()} (worker)" in str(error.value)


@pytest.mark.parametrize("field", CHANGES)
def test_halves_may_differ_in_their_generation_only(field):
    other = changed(**{field: CHANGES[field]})
    if field in {"generation", "private_token"}:
        BASE.require_same_model(other)
        return
    for left, right in [(BASE, other), (other, BASE)]:
        with pytest.raises(IdentityError, match=f"differ first in {field}"):
            left.require_same_model(right)


def test_weights_are_compared_once_both_halves_know_them():
    unknown = changed(weights=None)
    for left, right in [(BASE, unknown), (unknown, BASE), (unknown, unknown)]:
        left.require_same_model(right)
    with pytest.raises(IdentityError, match="kv_dtype"):
        BASE.require_same_model(changed(weights=None, kv_dtype="float16"))


def test_a_generation_is_another_namespace_of_the_same_base():
    raised = BASE.with_generation(3, "token")
    assert (raised.generation, raised.private_token) == (3, "token")
    assert raised.namespace != BASE.with_generation(3).namespace != BASE.namespace
    assert raised.base_digest == BASE.base_digest


@pytest.mark.parametrize(
    "identity", [BASE, changed(weights=None, state_dtypes=()), BASE.with_generation(2, "t")]
)
def test_a_manifest_reads_back_to_the_same_identity(identity):
    manifest = json.loads(json.dumps(identity.manifest()))
    assert ModelIdentity.from_manifest(manifest) == identity
    assert manifest["config"]["rope_theta"] == 10000


@pytest.mark.parametrize("manifest", [{}, BASE.manifest() | {"flavour": 1}])
def test_a_manifest_with_other_fields_is_refused(manifest):
    with pytest.raises(IdentityError, match="other fields"):
        ModelIdentity.from_manifest(manifest)


def test_the_first_difference_names_the_path_and_both_values():
    other = changed(config=canonical_json(CONFIG | {"scale": {"factor": 8, "on": True}}))
    assert BASE.first_difference(other) == "config.scale.factor: 4 != 8"
    assert BASE.first_difference(BASE) is None


def test_the_first_difference_knows_absent_from_null():
    with_null = changed(config=canonical_json(CONFIG | {"extra": None}))
    assert BASE.first_difference(with_null) == "config.extra: absent != None"
    assert with_null.first_difference(BASE) == "config.extra: None != absent"


def test_the_first_difference_is_found_exactly_when_digests_differ():
    identities = [
        BASE,
        changed(weights=None),
        *[changed(**{field: value}) for field, value in CHANGES.items()],
    ]
    for left in identities:
        for right in identities:
            assert (left.first_difference(right) is None) == (left.digest == right.digest)
