"""What was counted at a border."""

from prometheus_client import REGISTRY


def errors(where):
    """Failures caught there so far."""
    return REGISTRY.get_sample_value("ucm_errors_total", {"where": where}) or 0.0
