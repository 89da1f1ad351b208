"""Random requests, made from the server's own OpenAPI document."""

from __future__ import annotations

import contextlib

import hypothesis
import schemathesis
from hypothesis import HealthCheck, given, settings


def test_random_requests_never_fail_the_server(server) -> None:
    document = server.get("/openapi.json").json()
    counts = dict.fromkeys(schemathesis.GenerationMode, 0)

    limits = {
        "/v1/chat/completions": "max_completion_tokens",
        "/v1/completions": "max_tokens",
        "/v1/messages": "max_tokens",
        "/v1/responses": "max_output_tokens",
    }
    assert set(limits) <= set(document["paths"])

    def fuzz(operation, mode) -> None:
        limit = limits.get(operation.path)

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(mode))
        def check(case):
            body = case.body
            # An answer as long as the context takes minutes.
            if isinstance(body, dict) and limit and isinstance(body.get(limit, 0), int):
                body[limit] = 2
            answer = case.call(base_url=server.url, timeout=120)
            assert answer.status_code < 500, (body, answer.text)
            counts[mode] += 1

        # Nothing can be wrong for an operation without parameters.
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):
            check()

    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        for mode in schemathesis.GenerationMode:
            fuzz(found.ok(), mode)
    assert min(counts.values()) > 20
    assert server.get("/health").status_code == 200
