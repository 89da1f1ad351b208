"""Lines of tasks: what they may hold, and what is said of those that are wrong."""

from __future__ import annotations

import pytest

from polysilicon.errors import ConfigError
from polysilicon.evals.tasks import NORMALISATIONS, ExactMatch, MultipleChoice, parse_task

CHOICE = {"context": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}
MATCH = {"prompt": "2 + 2 =", "answer": " 4"}


@pytest.mark.parametrize("answer", [1, " 4"])
@pytest.mark.parametrize("name", ["context", "prompt"])
def test_multiple_choice(answer, name):
    line = {name: "2 + 2 =", "choices": [" 3", " 4"], "answer": answer, "id": 7, "subject": "sums"}
    task = parse_task(line, "f, line 1")
    assert task == MultipleChoice(
        place="f, line 1", context="2 + 2 =", choices=(" 3", " 4"), answer=1
    )


def test_exact_match():
    task = parse_task(MATCH, "f, line 1")
    assert isinstance(task, ExactMatch)
    assert (task.prompt, task.answers, task.stop, task.max_tokens) == (
        "2 + 2 =",
        ("4",),
        ("\n",),
        64,
    )
    line = {"context": "a", "answers": ["The  Four!", "4"], "max_tokens": 3, "stop": ["x", "yz"]}
    task = parse_task({**line, "normalisation": "squad"}, "f, line 2")
    assert isinstance(task, ExactMatch)
    assert (task.answers, task.stop, task.max_tokens) == (("four", "4"), ("x", "yz"), 3)
    assert parse_task({**MATCH, "stop": "."}, "f, line 3").stop == (".",)
    assert parse_task({**MATCH, "stop": []}, "f, line 3").stop == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, '"context" or "prompt"'),
        ({**CHOICE, "context": ""}, '"context" or "prompt"'),
        ({**CHOICE, "context": 4}, '"context" or "prompt"'),
        ({**CHOICE, "prompt": "both"}, '"context" or "prompt"'),
        ({**CHOICE, "choices": " 3 4"}, '"choices" needs a list of texts'),
        ({**CHOICE, "choices": [3, 4]}, '"choices" needs a list of texts'),
        ({**CHOICE, "choices": None}, '"choices" needs a list of texts'),
        ({**CHOICE, "choices": [" 4"]}, "two texts or more"),
        ({**CHOICE, "choices": [" 4", ""]}, "none of them empty"),
        ({**CHOICE, "answer": 2}, "index between 0 and 1"),
        ({**CHOICE, "answer": -1}, "index between 0 and 1"),
        ({**CHOICE, "answer": True}, "index between 0 and 1"),
        ({**CHOICE, "answer": "4"}, "the text of a choice"),
        ({**CHOICE, "answer": [1]}, "the text of a choice"),
        ({"context": "a", "choices": ["b", "c"]}, '"answer" needs'),
        ({**CHOICE, "max_tokens": 3}, "'max_tokens' does not go with multiple choice"),
        ({"context": "a", "choises": ["b", "c"], "answer": 1}, "did you mean 'choices'"),
        ({**MATCH, "max_token": 3}, "did you mean 'max_tokens'"),
        ({"prompt": "a"}, 'needs one of "choices", "answer"'),
        ({**MATCH, "answers": ["4"]}, 'needs one of "choices", "answer"'),
        ({"prompt": "a", "answer": 4}, '"answer" needs a text'),
        ({"prompt": "a", "answers": "4"}, '"answers" needs a list of texts'),
        ({"prompt": "a", "answers": []}, '"answers" is empty'),
        ({**MATCH, "max_tokens": 0}, '"max_tokens" must be above 0'),
        ({**MATCH, "max_tokens": 1 << 31}, '"max_tokens" must be above 0'),
        (
            {**MATCH, "max_tokens": -(10**4000)},
            '"max_tokens" must be above 0, not -1000000000000000000',
        ),
        ({**MATCH, "max_tokens": "3"}, '"max_tokens" needs a number'),
        ({**MATCH, "max_tokens": True}, '"max_tokens" needs a number'),
        ({**MATCH, "stop": 3}, '"stop" needs a text or a list of texts'),
        ({**MATCH, "stop": ["a", ""]}, '"stop" holds an empty text'),
        ({**MATCH, "stop": ""}, '"stop" holds an empty text'),
        ({**MATCH, "normalisation": "lower"}, "one of none, strip, squad"),
        ({**MATCH, "normalisation": ["squad"]}, "one of none, strip, squad"),
    ],
)
def test_a_wrong_line_names_the_place_and_the_mend(line, message):
    with pytest.raises(ConfigError, match=r"^tasks\.jsonl, line 9: ") as error:
        parse_task(line, "tasks.jsonl, line 9")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "normalised"),
    [
        ("none", " A b. ", " A b. "),
        ("strip", " A b. \n", "A b."),
        ("squad", "  The cat, an  Apple-pie & a dog! ", "cat applepie dog"),
        ("squad", "Theatre", "theatre"),
    ],
)
def test_normalisations(name, text, normalised):
    assert NORMALISATIONS[name](text) == normalised
