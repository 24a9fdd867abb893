"""How SGLang runs in the stories: arguments of `sglang.Engine`."""

from pathlib import Path
from typing import Any

PAGE_TOKENS = 16


def engine_arguments(checkpoint: Path, **more: Any) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: token ids in and out, float32, a small pool, chunks of 256 tokens."""
    common: dict[str, Any] = {"model_path": str(checkpoint), "skip_tokenizer_init": True, "device": "cpu"}
    common |= {"attention_backend": "torch_native", "dtype": "float32", "page_size": PAGE_TOKENS}
    # a fraction of the machine's free memory, of which the pool takes only what its tokens need
    common |= {"mem_fraction_static": 0.5, "max_total_tokens": 2048, "max_running_requests": 4}
    common |= {"disable_overlap_schedule": True, "disable_cuda_graph": True, "chunked_prefill_size": 256}
    return common | more
