"""What the gateway counts. Labels are bounded sets: never a tenant, a deployment or a request."""

from __future__ import annotations

from headrace.observe.metrics import counter, gauge, histogram

REQUESTS = counter(
    "headrace_gateway_requests_total", "Answers asked for, by how they ended.", ("method", "outcome", "reason")
)
IN_FLIGHT = gauge("headrace_gateway_requests_in_flight", "Answers being made now.")
FIRST_TOKEN_SECONDS = histogram("headrace_gateway_first_token_seconds", "From admission to the first token, seconds.")
INTER_TOKEN_SECONDS = histogram("headrace_gateway_inter_token_seconds", "Between two tokens of an answer, seconds.")
TOKENS = counter("headrace_gateway_tokens_total", "Tokens of prompts (in) and answers (out).", ("direction",))
TOKENS_IN, TOKENS_OUT = TOKENS.labels("in"), TOKENS.labels("out")  # looked up once: they are counted per message
ATTEMPTS = counter("headrace_gateway_attempts_total", "Attempts at engines, by how they ended.", ("outcome",))
RECOVERIES = counter("headrace_gateway_recoveries_total", "What followed failed attempts.", ("action", "reason"))
ATTACH_CONNECTIONS = gauge("headrace_gateway_attach_connections", "Streams to engines.")
OPEN_SLOTS = gauge("headrace_gateway_open_slots", "Sequences on those streams whose finish has not come.")
HTTP_RESPONSES = counter(
    "headrace_gateway_http_responses_total",
    "HTTP requests by path and status; 499: the client left.",
    ("path", "status"),
)
HTTP_SECONDS = histogram("headrace_gateway_http_seconds", "From a request's head to its end, seconds.", ("path",))
