"""Ollama's API, as version 0.17.4 of a real Ollama answers it.

A request: `request_fields` reads it, `chat_request`, `generate_request` and `embed_request` make OpenAI's request of it
with `sampling_options` and `message_translation`, and `keep_alive_time` reads for how long the model is to stay.

An answer: `engine_answer` reads what an engine sends, `answer_lines` writes Ollama's objects, `chat_answer` and
`embed_answer` are the bodies that turn the one into the other on the way to the client.
"""
