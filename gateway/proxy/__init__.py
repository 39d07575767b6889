"""The way of a request to an inference engine and back: that of the proxy of a host, of a pod, and of the gateway.

The steps of a request, file by file; `handler` begins it and `inference_request` controls steps 3 to 7, the other files
each do one part:

1. accept: `listeners`, one socket per service and one of the router, for all services; `tls`, their certificate
2. path and token: `paths`, the served paths; `inference_head`, the decision whether the client may use the listener,
   and all that follows from a head that clients repeat
3. body and service: `content_coding`, decode what is compressed; `request_body`, memory for the body and the model in
   it; `request_form`, the same of a form with a file; `request_media` and `request_schemas`, what no engine may get;
   `router`, the model's service; `served_routes`, the paths that its engines answer
4. queue: `request_queue` and `token_lanes`, wait for a slot and for cells; `load_balancer`, pick the least busy backend
5. upstream: `upstream_request`, send the request to the engine; `attempts`, another one after a failure; `keep_alive`,
   comments to a client that waits
6. stream back: `upstream_request` again; `response_body`, rewrite and count what the engine sends; `responses_stream`,
   complete the events of /v1/responses; `response_end`, who was at fault if it is not whole, and the client's error
7. record: `token_counts`, as engines report them; `service`, counts and the log line; `metrics`, for Prometheus;
   `errors`, every error in OpenAI's form; `health_monitor`, the answers of each backend; `backend_health`, the decision
   that a backend is sick

Requests to Ollama's API, at the router of one machine, are `ollama_request`s: translated by `gateway.dialects` after
step 3 and before step 6, and requests as all others between them. `ollama_api` answers its other paths, and
`model_control` is what they may change.

`engine_metrics` adds the engine's own metrics to those of a pod, and `exposition` keeps the lines that are valid.

`pod` is the process of a pod, and `gateway.cluster` has that of the gateway. `control` is that of a host,
`control_socket` its claim and the hand-over to a newer one, `control_api` its control API, `control_client` the client,
`config` the messages of both. `gateway.http` serves clients, engines and the control API; only `control_client` uses
aiohttp, for it starts slowly.
"""
