"""What of a request is in its keys, and which are not cached at all; on vLLM's own request objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ucm_core.errors import IdentityError
from ucm_core.spec.keys import PrefixChain
from ucm_vllm.request_identity import AdapterDigests, RequestIdentities

vllm = pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.request import Request  # noqa: E402


def request(**fields: Any) -> Request:
    given: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": list(range(3, 203)),
        "pooling_params": None,
    }
    return Request(**(given | {"sampling_params": SamplingParams(max_tokens=1)} | fields))


def adapter(
    directory: Path, weights: bytes = b"weights", name: str = "a", number: int = 1, **more: Any
) -> LoRARequest:
    path = directory / name
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path), **more)


def seed(asked: Request, identities: RequestIdentities | None = None) -> bytes:
    keys = (identities or RequestIdentities()).of(asked)
    assert keys is not None
    return keys.identity.seed


def image(identifier: str, offset: int = 10, length: int = 20) -> MultiModalFeatureSpec:
    position = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=position)


def test_a_plain_request_has_no_seed() -> None:
    assert seed(request()) == b""


def test_salts_and_adapters_differ_from_each_other(tmp_path: Path) -> None:
    lora = adapter(tmp_path)
    seeds = [
        seed(request()),
        seed(request(cache_salt="t1")),
        seed(request(cache_salt="t2")),
        seed(request(lora_request=lora)),
        seed(request(lora_request=lora, cache_salt="t1")),
    ]
    assert len(set(seeds)) == 5


def test_the_engines_adapter_number_is_not_in_the_key(tmp_path: Path) -> None:
    identities, lora = RequestIdentities(), adapter(tmp_path, number=3)
    again = LoRARequest(lora_name="a", lora_int_id=11, lora_path=lora.lora_path)
    assert seed(request(lora_request=again), identities) == seed(request(lora_request=lora), identities)


def test_an_adapter_is_its_content(tmp_path: Path) -> None:
    first = seed(request(lora_request=adapter(tmp_path, b"weights")))
    assert seed(request(lora_request=adapter(tmp_path, b"weightz"))) != first


def test_an_adapter_is_also_its_name(tmp_path: Path) -> None:
    first = seed(request(lora_request=adapter(tmp_path, name="law-v1")))
    assert seed(request(lora_request=adapter(tmp_path, name="law-v2"))) != first


def test_an_adapter_that_changed_on_disk_is_not_cached_any_more(tmp_path: Path) -> None:
    identities = RequestIdentities()
    assert identities.of(request(lora_request=adapter(tmp_path))) is not None
    assert identities.of(request(lora_request=adapter(tmp_path, b"other weights"))) is None
    assert identities.of(request(lora_request=adapter(tmp_path, b"weights"))) is None


def test_an_adapter_that_is_replaced_in_place_is_not_cached(tmp_path: Path) -> None:
    assert RequestIdentities().of(request(lora_request=adapter(tmp_path, load_inplace=True))) is None


def test_an_adapter_that_was_replaced_in_place_once_is_not_cached_any_more(tmp_path: Path) -> None:
    """Its files may have changed after vLLM read them: only vLLM knows what it holds."""
    identities = RequestIdentities()
    assert identities.of(request(lora_request=adapter(tmp_path, load_inplace=True))) is None
    assert identities.of(request(lora_request=adapter(tmp_path))) is None


def test_an_adapter_that_changed_on_disk_is_not_cached_under_a_new_number_either(tmp_path: Path) -> None:
    """The engine's own cache knows adapters by name and path: the new one gets the blocks of the old."""
    identities = RequestIdentities()
    assert identities.of(request(lora_request=adapter(tmp_path))) is not None
    assert identities.of(request(lora_request=adapter(tmp_path, b"other weights", number=2))) is None


def test_a_number_that_names_two_adapters_is_not_cached(tmp_path: Path) -> None:
    """The engine goes on using the one that it loaded first."""
    identities = RequestIdentities()
    first, second = adapter(tmp_path, name="a"), adapter(tmp_path, b"others", name="b")
    assert identities.of(request(lora_request=first)) is not None
    assert identities.of(request(lora_request=second)) is None
    assert identities.of(request(lora_request=first)) is None


def test_a_large_adapter_that_is_distrusted_while_it_is_read_stays_so(tmp_path: Path) -> None:
    digests = AdapterDigests(inline_bytes=0)
    identities = RequestIdentities(digests)
    lora = adapter(tmp_path)
    identities.of(request(lora_request=lora))
    replaced = LoRARequest(lora_name="a", lora_int_id=1, lora_path=lora.lora_path, load_inplace=True)
    identities.of(request(lora_request=replaced))
    digests.wait()
    assert identities.of(request(lora_request=lora)) is None


def test_an_adapter_without_files_is_not_cached(tmp_path: Path) -> None:
    lora = LoRARequest(lora_name="hub", lora_int_id=1, lora_path=str(tmp_path / "absent"))
    assert RequestIdentities().of(request(lora_request=lora)) is None


def test_a_large_adapter_is_cached_once_its_digest_is_known(tmp_path: Path) -> None:
    digests = AdapterDigests(inline_bytes=0)
    identities, asked = RequestIdentities(digests), request(lora_request=adapter(tmp_path))
    assert identities.of(asked) is None
    digests.wait()
    assert identities.of(asked) is not None


@pytest.mark.parametrize(
    "fields", [{"resumable": True}, {"prompt_is_token_ids": [True] * 200}, {"cache_salt": ""}]
)
def test_requests_that_are_not_cached(fields: dict[str, Any]) -> None:
    assert RequestIdentities().of(request(**fields)) is None


def test_embeddings_are_not_cached() -> None:
    import torch

    embeddings = torch.zeros(200, 8)
    assert RequestIdentities().of(request(prompt_token_ids=None, prompt_embeds=embeddings)) is None


def test_media_carry_their_place_and_content() -> None:
    keys = RequestIdentities().of(request(mm_features=[image("cat", 10, 20), image("dog", 40, 5)]))
    assert keys is not None
    assert [(item.begin, item.end) for item in keys.media] == [(10, 30), (40, 45)]
    assert len({item.digest for item in keys.media}) == 2
    assert {len(item.digest) for item in keys.media} == {32}


def test_equal_tokens_around_another_picture_have_other_keys() -> None:
    from ucm_core.spec.keys import PrefixChain

    digests = []
    for identifier in ("cat", "dog"):
        keys = RequestIdentities().of(request(mm_features=[image(identifier, 70, 20)]))
        assert keys is not None
        chain = PrefixChain(keys.identity, grain_tokens=64, media=keys.media)
        chain.extend(list(range(200)))
        digests.append(chain.digests)
    assert (digests[0][0] == digests[1][0]).all()
    assert (digests[0][1:] != digests[1][1:]).any(axis=1).all()


# -- tokens in torch tensors, which the core takes without importing torch


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_tensor_of_tokens_gives_the_keys_of_a_list(dtype: Any) -> None:
    chains = [PrefixChain(grain_tokens=16) for _ in range(3)]
    tokens = [1, 2, 300, 70000] * 16
    chains[0].extend(tokens)
    chains[1].extend(torch.tensor(tokens, dtype=dtype))
    chains[2].extend(torch.tensor(tokens, dtype=dtype).repeat_interleave(2)[::2])  # not contiguous
    assert len({chain.digests.tobytes() for chain in chains}) == 1


@pytest.mark.parametrize(
    "tokens", [torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor(1), torch.tensor([True])]
)
def test_a_tensor_that_is_no_row_of_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(IdentityError, match="integers"):
        PrefixChain(grain_tokens=1).extend(tokens)
