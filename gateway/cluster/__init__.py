"""The gateway of a cluster: one address for all services, in pods and on hosts, for clients with keys.

It is the request pipeline of `gateway.proxy` with other routers and backends. The way of a request, file by file:

1. key: `keys`, the key that its client has sent, and the services and routes that it opens (`usable_route`)
2. limits: `admission`, the reservation of what it may use (`token_estimate`), by the arithmetic of `rate_limits`,
   counted in this process (`limiter`) or with all replicas (`redis_limits`); `rate_headers`, what its client is told
3. endpoint: `routed_service`, the one of its conversation (`affinity`, `endpoint_choice`), unless it is ejected
   (`endpoint_health`); another one, where that has failed before it answered (`retry_budget`)
4. end: `admission` settles by the engine's counts, and `usage` has the sums by key and service

All of it follows from the cluster: `watched_objects` says what is watched, and which part of each object is kept,
`cluster_feed` watches, and `catalog` has the services with their endpoints and tokens. `gateway_process` is the
process: watches, listener, health and metrics, and their orderly end.
"""
