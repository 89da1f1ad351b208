"""What can be said of a request before it comes to an engine."""

from __future__ import annotations

from polysilicon.errors import RequestError
from polysilicon.request import Request
from polysilicon.sampling.grammar import check_grammar
from polysilicon.sampling.rows import validate
from polysilicon.scheduler import check_length


def check_request(request: Request, *, vocab_size: int, max_length: int) -> None:
    """RequestError, naming the mend, for a request that no engine of such a model could serve."""
    prompt, params = request.prompt, request.params
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RequestError(f"prompt token ids must lie in [0, {vocab_size}), the vocabulary")
    check_length(
        len(prompt), max_length if params.max_tokens is None else params.max_tokens, max_length
    )
    validate(params, vocab_size)
    if request.embed is not None and (
        params.max_tokens != 0 or params.n != 1 or request.grammar is not None
    ):
        raise RequestError("a request that embeds generates nothing: give max_tokens=0 and n=1")
    if request.grammar is not None:
        check_grammar(request.grammar)
