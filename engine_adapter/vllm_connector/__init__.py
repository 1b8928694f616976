"""The parts of vLLM's connector (`engine_adapter.vllm`): what the scheduling process does, what a rank does, and what
makes vLLM's KV interchangeable. Only `messages`, `scheduler` and `rank` import vLLM.
"""
