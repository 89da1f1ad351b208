"""Requests with a grammar in whole engines: a tiny random model at high temperature, whose answers
would be noise."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from polysilicon.engine.client import Client
from polysilicon.engine.engine import Engine
from polysilicon.errors import RequestError
from polysilicon.reference.device import ReferenceDevice
from polysilicon.request import FinishReason, Grammar, Request, RequestOutput, SamplingParams
from polysilicon.sampling.grammar import Grammars
from polysilicon.testing.engine_bench import EngineBench, greedy, random_prompt
from polysilicon.testing.tiny_models import EOS, VOCABULARY, tiny_llama
from polysilicon.testing.tiny_text import write_text_side
from polysilicon.tokenizer import Tokenizer

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["alpha", "beta"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
JSON = Grammar(kind="json_schema", text=json.dumps(RECORD))
WORD = Grammar(kind="regex", text="[a-z]{3,9}")
DATE = Grammar(kind="regex", text="on the [0-9]{2}\\.[0-9]{2}\\.")
PROMPT = (5, 6, 7, 8, 9, 10, 11)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> EngineBench:
    folder = tmp_path_factory.mktemp("model")
    bench = EngineBench(ReferenceDevice(), tiny_llama(), folder, max_length=320)
    write_text_side(folder)
    return bench


@pytest.fixture(scope="module")
def tokenizer(bench: EngineBench, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("text")
    write_text_side(folder)
    return Tokenizer.from_directory(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    grammars = Grammars(tokenizer, vocab_size=VOCABULARY, eos_ids=frozenset({EOS}))
    yield grammars
    grammars.close()


@pytest.fixture
def engine(bench: EngineBench, grammars: Grammars) -> Iterator[Engine]:
    engine = bench.engine()
    engine.serve_grammars(grammars)
    yield engine
    bench.close(engine)


@dataclasses.dataclass
class Told:
    """All news of a choice through a client."""

    text: str = ""
    ids: tuple[int, ...] = ()
    news: int = 0
    last: RequestOutput | None = None

    @property
    def reason(self) -> FinishReason | None:
        assert self.last is not None
        return self.last.finish_reason


Tell = Callable[..., dict[tuple[str, int], Told]]


@pytest.fixture
def tell(tokenizer: Tokenizer) -> Tell:
    """Serve requests through a client; what became of each choice."""

    def tell(engine: Engine, *requests: Request) -> dict[tuple[str, int], Told]:
        client = Client(engine, tokenizer)
        told: dict[tuple[str, int], Told] = {}
        deadline = time.monotonic() + 120
        for output in client.generate(requests):
            assert time.monotonic() < deadline
            choice = told.setdefault((output.request_id, output.choice), Told())
            assert choice.last is None or choice.last.finish_reason is None
            choice.text += output.text
            choice.ids += output.ids
            choice.news += 1
            choice.last = output
            engine.kv.check_integrity()
        assert not engine.stats().requests
        assert all(usage.in_use == usage.limbo == 0 for usage in engine.kv.usage())
        return told

    return tell


def request(
    grammar: Grammar | None, id: str = "r", prompt: Sequence[int] = PROMPT, **fields: Any
) -> Request:
    values = {"max_tokens": 300, "temperature": 1.5, "seed": 1} | fields
    return Request(id=id, prompt=tuple(prompt), params=SamplingParams(**values), grammar=grammar)


def is_record(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == set(RECORD["properties"])
        and len(value["name"]) <= 4
        and 0 <= value["count"] <= 99
        and value["kind"] in ("alpha", "beta")
    )


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_what_stops_is_whole(
    bench: EngineBench, grammars: Grammars, tell: Tell, run_ahead: bool, temperature: float
) -> None:
    engine = bench.engine(run_ahead=run_ahead)
    engine.serve_grammars(grammars)
    choice = Grammar(kind="choice", text='["yes", "no", "not now"]')
    lark = Grammar(kind="lark", text='start: pair+\npair: "<" /[ab]{1,3}/ ">"')
    told = tell(
        engine,
        *(
            request(grammar, f"{name}-{seed}", temperature=temperature, seed=seed)
            for seed in range(5)
            for name, grammar in {
                "json": JSON, "word": WORD, "date": DATE, "choice": choice, "lark": lark,
                "object": Grammar(kind="json_object"),
            }.items()
        ),
    )  # fmt: skip
    stopped = {key[0]: one.text for key, one in told.items() if one.reason is FinishReason.STOP}
    for id, text in stopped.items():
        name = id.split("-")[0]
        if name == "json":
            assert is_record(text)
        elif name == "object":
            assert isinstance(json.loads(text), dict)
        elif name == "choice":
            assert text in ("yes", "no", "not now")
        else:
            pattern = {"lark": "(<[ab]{1,3}>)+"}.get(name) or {"word": WORD, "date": DATE}[
                name
            ].text
            assert re.fullmatch(pattern, text)
    kinds = {id.split("-")[0] for id in stopped}
    assert kinds >= {"json", "word", "date", "choice"}
    assert all(one.reason in (FinishReason.STOP, FinishReason.LENGTH) for one in told.values())
    bench.close(engine)


def test_forced_tokens_take_no_step(engine: Engine, tell: Tell) -> None:
    steps, output = engine.counts.steps, engine.counts.output_tokens
    told = tell(engine, request(DATE))["r", 0]
    assert told.reason is FinishReason.STOP
    assert len(told.ids) == len(told.text) == len("on the 12.34.")
    # Four digits are sampled; what stands between them comes along, and so does the end.
    assert engine.counts.steps - steps == 4
    assert engine.counts.output_tokens - output == len(told.ids)
    assert told.news == 5
    steps = engine.counts.steps
    told = tell(engine, request(Grammar(kind="choice", text='["only this"]'), n=3))
    assert [one.text for one in told.values()] == ["only this"] * 3
    assert all(one.reason is FinishReason.STOP for one in told.values())
    assert engine.counts.steps == steps


def test_jumping_changes_no_token_that_is_sampled_greedily(engine: Engine, tell: Tell) -> None:
    """With log-probabilities every token has a pass of its own."""
    for grammar in (DATE, JSON, Grammar(kind="choice", text='["abcdef", "abcxyz"]')):
        jumped = tell(engine, request(grammar, temperature=0))["r", 0]
        stepped = tell(engine, request(grammar, temperature=0, logprobs=0))["r", 0]
        assert jumped.text == stepped.text
        assert jumped.ids == stepped.ids
        assert jumped.news < stepped.news


def test_log_probabilities_are_of_every_token(bench: EngineBench, engine: Engine) -> None:
    asked = request(DATE, temperature=0, logprobs=2, prompt_logprobs=0)
    answer = bench.run(engine, [asked])["r", 0]
    assert [entry.id for entry in answer.logprobs] == answer.ids
    assert len(answer.prompt_logprobs) == len(PROMPT) - 1
    logits = bench.logits([*PROMPT, *answer.ids], None)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for index, entry in enumerate(answer.logprobs):
        assert entry.logprob == pytest.approx(
            expected[len(PROMPT) - 1 + index, entry.id], abs=bench.bound
        )


def test_max_tokens_cut(engine: Engine, tell: Tell) -> None:
    for most in range(15):
        told = tell(engine, request(DATE, max_tokens=most))["r", 0]
        assert len(told.ids) == min(most, 13)
        assert told.reason is (FinishReason.STOP if most >= 13 else FinishReason.LENGTH)


def test_the_context_cuts(engine: Engine, tell: Tell) -> None:
    told = tell(engine, request(Grammar(kind="regex", text="a{400}"), prompt=range(4, 200)))["r", 0]
    assert told.reason is FinishReason.LENGTH
    assert len(told.ids) == 320 - 196


def test_choices_of_one_request_differ_and_all_hold(engine: Engine, tell: Tell) -> None:
    told = tell(engine, request(JSON, n=6))
    assert all(is_record(one.text) for one in told.values() if one.reason is FinishReason.STOP)
    assert len({one.text for one in told.values()}) > 3
    assert len(told) == 6


def test_a_seed_gives_the_same_in_any_company(engine: Engine, tell: Tell) -> None:
    alone = {seed: tell(engine, request(JSON, seed=seed))["r", 0].ids for seed in range(3)}
    together = tell(
        engine,
        *(request(JSON, f"{seed}", seed=seed) for seed in range(3)),
        request(None, "other", max_tokens=60),
        request(WORD, "word"),
    )
    assert alone == {seed: together[f"{seed}", 0].ids for seed in range(3)}


def test_neighbours_are_not_touched(bench: EngineBench, engine: Engine) -> None:
    rng = np.random.default_rng(5)
    neighbours = [
        Request(id=f"n{index}", prompt=random_prompt(rng, 4 + 7 * index), params=greedy(40))
        for index in range(4)
    ]
    alone = bench.run(engine, neighbours)
    beside = bench.run(
        engine,
        [
            request(JSON, "g1"), neighbours[0], request(WORD, "g2"), *neighbours[1:],
            request(Grammar(kind="regex", text="("), "broken"),
        ],
    )  # fmt: skip
    bench.judge(neighbours, beside)
    for one in neighbours:
        assert beside[one.id, 0].ids == alone[one.id, 0].ids
    assert beside["broken", 0].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_sequences_go_on_where_they_were(
    bench: EngineBench, grammars: Grammars, tell: Tell, prefix_cache: bool
) -> None:
    requests = [
        request(JSON, f"{seed}", seed=seed, prompt=(seed + 4,) * 9, max_tokens=100)
        for seed in range(6)
    ]
    roomy = bench.engine()
    roomy.serve_grammars(grammars)
    calm = tell(roomy, *requests)
    bench.close(roomy)
    pages = bench.pages_for(9 + 100) + 3
    engine = bench.engine(pages=pages, prefix_cache=prefix_cache)
    engine.serve_grammars(grammars)
    tight = tell(engine, *requests)
    assert engine.scheduler.num_preemptions > 0
    for key, one in calm.items():
        assert tight[key].ids == one.ids
        assert tight[key].text == one.text
    bench.close(engine)


def test_the_text_is_the_grammars_whatever_the_prompt_ends_in(
    engine: Engine, tell: Tell, tokenizer: Tokenizer
) -> None:
    half = tokenizer.encode("é", add_special=False, parse_special=False)[0]
    accent = Grammar(kind="choice", text='["é", "è"]')
    assert tell(engine, request(accent, prompt=(half,)))["r", 0].text in ("é", "è")


def test_stop_ids_end_only_what_is_whole(engine: Engine, tell: Tell, tokenizer: Tokenizer) -> None:
    """A closing bracket within a value is no end, and a stop id may come where the text is whole,
    though the grammar has no place for it."""
    [quote] = tokenizer.encode('"', add_special=False, parse_special=False)
    told = tell(
        engine, *(request(JSON, f"{seed}", seed=seed, stop_token_ids=(quote,)) for seed in range(4))
    )
    for one in told.values():
        assert one.reason is FinishReason.LENGTH or is_record(one.text)
    word = tell(engine, request(WORD, stop_token_ids=(quote,), logit_bias={quote: 100.0}))["r", 0]
    assert word.reason is FinishReason.STOP
    assert word.ids[-1] == quote
    assert re.fullmatch("[a-z]{3}", word.text)
    assert len(word.ids) == 4


def test_stop_texts_end_only_what_is_whole(engine: Engine, tell: Tell) -> None:
    told = tell(
        engine, *(request(JSON, f"{seed}", seed=seed, stop=('"', "a", "}")) for seed in range(3))
    )
    for one in told.values():
        assert one.reason is FinishReason.LENGTH or is_record(one.text)
        assert one.last is not None
        assert one.last.stop_text is None
    letters = Grammar(kind="regex", text="([a-c]{2},)*[a-c]{2}")
    for seed in range(20):
        told = tell(engine, request(letters, seed=seed, stop=("b", ","), temperature=2.0))
        one = told["r", 0]
        assert one.reason is not FinishReason.STOP or re.fullmatch(letters.text, one.text)
        assert "," not in one.text
    choice = Grammar(kind="choice", text='["stop it", "stopped"]')
    assert tell(engine, request(choice, stop=("stop", "t")))["r", 0].text in ("stop it", "stopped")


def test_min_tokens_holds_the_end_back(engine: Engine, tell: Tell) -> None:
    for seed in range(6):
        told = tell(engine, request(WORD, seed=seed, min_tokens=7, logit_bias={EOS: 50.0}))["r", 0]
        assert told.reason is FinishReason.STOP
        assert len(told.text) == 7
    told = tell(engine, request(WORD, min_tokens=200, max_tokens=250))["r", 0]
    assert re.fullmatch("[a-z]{9}", told.text)
    assert told.reason is FinishReason.STOP


def test_ignoring_the_end_goes_on_as_far_as_the_grammar_does(engine: Engine, tell: Tell) -> None:
    told = tell(engine, request(WORD, ignore_eos=True, logit_bias={EOS: 50.0}))["r", 0]
    assert re.fullmatch("[a-z]{9}", told.text)
    assert told.reason is FinishReason.STOP
    endless = Grammar(kind="regex", text="[a-z]+")
    assert tell(engine, request(endless, ignore_eos=True))["r", 0].reason is FinishReason.LENGTH


def test_a_model_without_an_end_token_ends_with_the_grammar(
    bench: EngineBench, tokenizer: Tokenizer, tell: Tell
) -> None:
    engine = bench.engine()
    engine.eos_ids = frozenset()
    grammars = Grammars(tokenizer, vocab_size=VOCABULARY, eos_ids=frozenset())
    engine.serve_grammars(grammars)
    told = tell(
        engine,
        request(DATE, "date"), request(JSON, "json", max_tokens=200),
        request(Grammar(kind="regex", text="a*"), "endless", max_tokens=9),
    )  # fmt: skip
    assert re.fullmatch(DATE.text, told["date", 0].text)
    assert told["json", 0].reason is FinishReason.LENGTH or is_record(told["json", 0].text)
    assert told["endless", 0].text == "a" * 9
    assert told["endless", 0].reason is FinishReason.LENGTH
    grammars.close()
    bench.close(engine)


def test_penalties_and_bias_act_within_the_grammar(
    engine: Engine, tell: Tell, tokenizer: Tokenizer
) -> None:
    letters = Grammar(kind="regex", text="[abc]{12}")
    a, b, c = tokenizer.encode("abc", add_special=False, parse_special=False)
    liked = tell(engine, request(letters, temperature=0, logit_bias={c: 100.0}))["r", 0]
    assert liked.text == "c" * 12
    varied = tell(
        engine,
        request(letters, temperature=0, presence_penalty=2, frequency_penalty=2,
                repetition_penalty=50.0)
    )["r", 0]  # fmt: skip
    assert set(varied.text) == {"a", "b", "c"}
    only = tell(engine, request(letters, allowed_token_ids=(a, b, EOS, 50)))["r", 0]
    assert set(only.text) <= {"a", "b"}
    assert len(only.text) == 12
    never = tell(engine, request(letters, temperature=2, bad_words=((a, a), (b,))))["r", 0]
    assert "aa" not in never.text
    assert "b" not in never.text
    assert len(never.text) == 12


@pytest.mark.parametrize("fields", [{"allowed_token_ids": (EOS,)}, {"bad_words": "first"}])
def test_where_no_token_is_left_the_request_ends_alone(
    engine: Engine, tell: Tell, tokenizer: Tokenizer, fields: dict
) -> None:
    ids = tokenizer.encode("mnop", add_special=False, parse_special=False)
    if "bad_words" in fields:
        fields = {"bad_words": tuple((token,) for token in ids)}
    told = tell(
        engine,
        request(Grammar(kind="regex", text="[mn][op]x"), "conflict", **fields),
        request(WORD, "good"),
    )
    conflict = told["conflict", 0].last
    assert conflict is not None
    assert conflict.finish_reason is FinishReason.ERROR
    assert conflict.refused
    assert "no token may come next" in (conflict.error or "")
    assert told["good", 0].reason is FinishReason.STOP
    later = tell(
        engine,
        request(Grammar(kind="regex", text="abc[mn]"), "late", bad_words=((ids[0],), (ids[1],))),
    )
    assert later["late", 0].text == "abc"
    assert later["late", 0].reason is FinishReason.ERROR


def test_refused_grammars_end_their_request_alone(engine: Engine, tell: Tell) -> None:
    told = tell(
        engine,
        request(Grammar(kind="json_schema", text='{"items": {"not": {}}}'), "bad", n=2),
        request(JSON, "good", temperature=0),
    )
    for choice in range(2):
        last = told["bad", choice].last
        assert last is not None
        assert last.finish_reason is FinishReason.ERROR
        assert last.refused
        assert "'not' at #/items" in (last.error or "")
    assert told["good", 0].reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_what_is_refused_at_once(bench: EngineBench, engine: Engine) -> None:
    assert not engine.has_work
    with pytest.raises(RequestError, match="longer than"):
        engine.add(request(Grammar(kind="regex", text="a" * 2**19)))
    with pytest.raises(RequestError, match="list of texts"):
        engine.add(request(Grammar(kind="choice", text="{}")))
    assert not engine.has_work
    bare = bench.engine()
    with pytest.raises(RequestError, match="serves no grammars"):
        bare.add(request(JSON))
    assert not bare.has_work
    bench.close(bare)


def test_who_waits_for_a_grammar_holds_nobody_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile = Grammars._compile
    gate: list[int] = []

    def slow(self: Grammars, grammar: Grammar) -> object:
        while not gate:
            time.sleep(0.001)
        return compile(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", slow)
    engine.add(request(Grammar(kind="regex", text="slow[ab]"), "slow", n=2))
    engine.add(request(None, "fast", max_tokens=5, ignore_eos=True))
    engine.add(request(Grammar(kind="regex", text="gone[ab]"), "gone"))
    assert engine.stats().waiting["grammar"] == 3
    ended: list[str] = []
    while "fast" not in ended:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["fast"]
    engine.cancel("gone")
    engine.cancel("slow", 1)
    assert engine.stats().waiting["grammar"] == 1
    news = [output for output in (*engine.step(), *engine.step()) if output.finish_reason]
    assert [(output.request_id, output.choice) for output in news] == [("gone", 0), ("slow", 1)]
    assert engine.has_work
    gate.append(1)
    ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert (output.request_id, output.choice) == ("slow", 0)
            ids += output.ids
    assert len(ids) == 5


def test_who_waited_for_a_grammar_keeps_its_place(bench: EngineBench, grammars: Grammars) -> None:
    engine = bench.engine(max_sequences=1)
    engine.serve_grammars(grammars)
    engine.add(request(None, "running", max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add(request(Grammar(kind="regex", text="[x-z]{9}"), "early"))
    engine.add(request(None, "late", max_tokens=3, ignore_eos=True))
    while engine.stats().waiting["grammar"]:
        assert "running" in engine._requests
        engine._start_following(engine._following)
        time.sleep(0.002)
    ended: list[str] = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["running", "early", "late"]
    bench.close(engine)


def test_a_grammar_that_wants_the_end_token_in_its_middle(engine: Engine, tell: Tell) -> None:
    told = tell(
        engine, request(Grammar(kind="lark", text='start: "a" <|im_end|> "b"'), max_tokens=20)
    )
    one = told["r", 0]
    assert one.reason is not FinishReason.STOP or one.ids == ()
    assert VOCABULARY > EOS


def test_random_histories_leave_nothing_behind(bench: EngineBench, grammars: Grammars) -> None:
    """Grammars good and bad, preemption, cancels at any time."""
    rng = np.random.default_rng(11)
    kinds = (
        JSON, WORD, DATE, None, Grammar(kind="json_object"), Grammar(kind="regex", text="["),
        Grammar(kind="choice", text='["one", "two"]'), Grammar(kind="json_schema", text="[]"),
    )  # fmt: skip
    engine = bench.engine(pages=bench.pages_for(320) + 4, max_sequences=5)
    engine.serve_grammars(grammars)
    living: set[str] = set()
    ended = 0
    for step in range(400):
        if step < 250 and rng.random() < 0.3:
            name = f"r{step}"
            engine.add(
                request(
                    kinds[int(rng.integers(len(kinds)))], name,
                    random_prompt(rng, int(rng.integers(1, 40))),
                    n=int(rng.integers(1, 3)), max_tokens=int(rng.integers(0, 60)), seed=step,
                    logprobs=0 if rng.random() < 0.2 else None,
                )
            )  # fmt: skip
            living.add(name)
        if living and rng.random() < 0.05:
            engine.cancel(str(rng.choice(sorted(living))))
        ended += sum(output.finish_reason is not None for output in engine.step())
        engine.kv.check_integrity()
    while engine.has_work:
        ended += sum(output.finish_reason is not None for output in engine.step())
    assert ended >= len(living) > 40
    assert not engine.stats().requests
    assert engine.stats().num_waiting == 0
    assert all(usage.in_use == usage.limbo == 0 for usage in engine.kv.usage())
    bench.close(engine)


def test_an_engine_loads_the_library_of_grammars_when_it_is_asked_for_one() -> None:
    code = "import sys, polysilicon.commands.run; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
