"""Small fused kernels of a decoder layer, in Triton: what torch would do in several passes over memory."""
