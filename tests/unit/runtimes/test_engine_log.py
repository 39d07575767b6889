"""The cause of an engine's end is found in its log, whatever its last lines say."""

import pytest

from runtimes.engine_errors import find_cause

LLAMA = """\
0.00.024.827 I srv          init: loading model
0.00.026.109 E llama_init_from_model: K cache type q8_0 with block size 32 does not divide n_embd_head_k=16
0.00.029.523 E cmn  common_init_: failed to create context with model '/models/plain.gguf'
0.00.030.499 I srv    operator(): operator(): cleaning up before exit...
error: Failed to init server, please check the input params.
"""
TEMPLATE = """\
0.00.024.141 I srv    load_model: initializing, n_slots = 1
0.00.024.398 E common_chat_templates_init: error: Unknown statement: endif
0.00.024.418 E srv          init: init: chat template parsing error: std::exception
error: Failed to init server, please check the input params.
"""
VLLM = """\
(EngineCore pid=7) INFO 11-29 09:00:00 [core.py:90] Initializing an engine
(EngineCore pid=7) ERROR 11-29 09:00:01 [core.py:99] ValueError: The model's max seq len (32768) is larger than 8192
Traceback (most recent call last):
  File "/usr/bin/vllm", line 8, in <module>
    raise RuntimeError("Engine core initialization failed: error: x")
RuntimeError: Engine core initialization failed. See root cause above.
"""
MLX = """\
Traceback (most recent call last):
  File "server.py", line 8, in <module>
    raise ValueError("error: not this line")
ValueError: Model type phi9 not supported.
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (LLAMA, "llama_init_from_model: K cache type q8_0 with block size 32 does not divide n_embd_head_k=16"),
        (TEMPLATE, "common_chat_templates_init: error: Unknown statement: endif"),
        (VLLM, VLLM.splitlines()[1]),
        (MLX, "ValueError: Model type phi9 not supported."),
        ("error: invalid argument: --nonsense\n", "error: invalid argument: --nonsense"),
        ("GGML_ASSERT(n_ctx > 0) failed\nAborted\n", "GGML_ASSERT(n_ctx > 0) failed"),
        ("loading\nbad head\n\n", "bad head"),
        ("", ""),
        ("error: a\x1b[2Jb\x00\u202ec\n", "error: a [2Jb c"),
        ("error: " + "x" * 999, "error: " + "x" * 293),
    ],
    ids=[
        "cache",
        "template",
        "vLLM",
        "mlx-lm",
        "argument",
        "assertion",
        "no error",
        "empty",
        "control characters",
        "long",
    ],
)
def test_first_error_is_the_cause(log: str, cause: str) -> None:
    assert find_cause(log) == cause
