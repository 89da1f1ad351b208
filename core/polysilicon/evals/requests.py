"""Many prompts through an engine, a bounded number of them at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from polysilicon.engine.loading import Loaded
from polysilicon.errors import RequestError
from polysilicon.request import Request, RequestOutput


def answers(
    loaded: Loaded, requests: Iterable[tuple[Request, str]]
) -> Iterator[tuple[Request, list[RequestOutput]]]:
    """Run requests, each with the place that an error names, as one continuous batch; each with all
    its outputs as it ends. Raises RequestError when one cannot be served, or the engine fails."""
    client = loaded.client
    waiting = iter(requests)
    # As many again as run, so that the batch is full while others end.
    most = 2 * loaded.engine.executor.max_sequences
    running: dict[str, tuple[Request, str, list[RequestOutput]]] = {}
    while True:
        while len(running) < most and (following := next(waiting, None)):
            request, place = following
            try:
                client.submit(request)
            except RequestError as error:
                raise RequestError(f"{place}: {error}") from None
            running[request.id] = request, place, []
        if not running:
            return
        for output in client.poll():
            request, place, outputs = running[output.request_id]
            outputs.append(output)
            if output.error is not None:
                raise RequestError(f"{place}: {output.error}")
            if output.finish_reason is not None:
                del running[request.id]
                yield request, outputs
