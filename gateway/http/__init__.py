"""HTTP/1.1 for proxies, on asyncio protocols and httptools; it knows nothing of services, tokens or models.

The side of the clients: `listener` accepts connections and ends them, `connection_table` holds the caps and times of
all, `server_connection` reads requests from one, `request_head` parses them strictly, and `exchange` is one request
with its response. What comes is passed on by plain calls; `awaited_exchange` is for requests that coroutines answer,
`whole_answers` for all ports of few paths (metrics, health, webhooks, APIs), with limits that strangers cannot strain.

The side of the upstreams: `upstream_pool` keeps connections, `upstream_connection` carries one request and response.

`peer_probes` finds upstreams that are gone without a word.

Both sides: `headers`, `limits`. Whoever is slow stops the sender on the other side: no body or response piles up in
memory beyond 256 KiB. Trailers are dropped, upgrades are not made, CONNECT is refused, interim responses are taken
from upstreams and not forwarded.
"""
