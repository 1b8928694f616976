"""TensorRT-LLM's connector: `leader` in the process that schedules, `rank` in each rank, `channel` between them."""
