"""One story per file: real engines, real processes, real kills.

Every story starts its engines as processes of their own (`harness.Engine`), each with the interpreter of the
engine's own environment: for vLLM the environment variable `UCM_VLLM_PYTHON` names it.
"""
