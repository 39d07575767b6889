"""APIs that no engine here speaks, translated to the paths of OpenAI that all of them have, and their answers back.

A translation is a function of bytes: it knows no connection, queue or engine. `gateway.proxy` decides by the path which
one a request needs, and from then on the request is one for OpenAI's path, with its queue, slots, health and counts.
"""
