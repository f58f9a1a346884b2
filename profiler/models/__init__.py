"""Our own plain PyTorch decoder: what capture traces and the executor runs."""

from profiler.models.decoder import CausalLM, build_model
from profiler.models.init import init_parameters, init_tensor, reset_buffers

__all__ = ["CausalLM", "build_model", "init_parameters", "init_tensor", "reset_buffers"]
