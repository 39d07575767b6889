"""Facts of weights from their own headers: GGUF, safetensors, and the configuration of a folder."""
