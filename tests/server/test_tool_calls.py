"""Test tool calls and thinking: parsed from whole and streamed answers of each dialect, forced, and in the history."""

from __future__ import annotations

import json

import jsonschema
import pytest

from quantkit.runtime.dialects.dialect import Dialect, dialects
from quantkit.runtime.engine import engine as engine_module
from quantkit.server import app
from quantkit.server.conversations import AnswerFormat, ChatRequest
from tests.server.conftest import TEMPLATE

CHAT = "/v1/chat/completions"
EOS = 1
USER = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WHO = {
    "type": "object",
    "properties": {"age": {"$ref": "#/$defs/age"}},
    "required": ["age"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
}
SCHEMAS = {"weather": WEATHER, "who": WHO, "nothing": {}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "who", "parameters": WHO}},
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
WITH_TOOLS = [name for name, each in dialects().items() if each.begin]


@pytest.fixture
def script(served, monkeypatch):
    """Return a function that makes the served model answer with a given text in a given dialect."""

    def write(text: str, dialect: Dialect) -> None:
        ids = [*served.llm.tokenizer(text, add_special_tokens=False)["input_ids"], EOS]
        monkeypatch.setattr(
            engine_module, "sample", lambda _, rows: [ids[len(each.ids) - each.num_prompt] for each, _ in rows]
        )
        monkeypatch.setattr(app, "find_dialect", lambda template: dialect)

    return write


def streamed(served, body: dict) -> tuple[dict, str]:
    """Return the message and the finish reason of a streamed answer, joined as OpenAI's clients do."""
    import urllib.request

    request = urllib.request.Request(
        served.url + CHAT, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    message, reason = {"content": None}, None
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            reason = choice["finish_reason"] or reason
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    message[name] = (message.get(name) or "") + value
                    continue
                calls = message.setdefault("tool_calls", [])
                for call in value:
                    assert call.pop("index") == len(calls)
                    calls.append(call)
    return message, reason


def answered(served, **fields) -> tuple[dict, str]:
    """Return the message and the finish reason of an answer; check that both are the same whole and streamed."""
    body = {"messages": [USER], "tools": TOOLS, **fields}
    status, answer = served.ask(CHAT, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    message, reason = choice["message"], choice["finish_reason"]
    in_parts, reason_of_parts = streamed(served, body)
    for each in (message, in_parts):
        ids = [call.pop("id") for call in each.get("tool_calls", ())]
        assert len(set(ids)) == len(ids)
        assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert in_parts["content"] == (message["content"] or "")
    assert {**in_parts, "content": None} == {**message, "content": None}
    assert reason_of_parts == reason
    return message, reason


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_call_in_each_dialect(served, script, name):
    dialect = dialects()[name]
    begin, end = dialect.thinking
    thinking = f"{begin}\nHm.\n{end}\n\n" if begin else ""
    script(f"{thinking}Let me see.\n{dialect.example}", dialect)
    message, reason = answered(served)
    expected = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}
    assert message == {**expected, **({"reasoning_content": "Hm."} if begin else {})}
    assert reason == "tool_calls"


def test_calls_alone_have_no_content(served, script):
    script(2 * dialects()["hermes"].example, dialects()["hermes"])
    message, reason = answered(served)
    assert message == {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    assert reason == "tool_calls"
    assert answered(served, parallel_tool_calls=False)[0]["tool_calls"] == [CALL]


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}])
def test_calls_are_text_where_none_is_expected(served, script, fields):
    example = dialects()["hermes"].example
    script(example, dialects()["hermes"])
    message, reason = answered(served, **fields)
    if "response_format" in fields:
        assert message["tool_calls"] == [CALL]
    else:
        assert (message, reason) == ({"role": "assistant", "content": example}, "stop")


def test_a_call_that_is_cut_off_is_text(served, script):
    example = dialects()["hermes"].example
    script(example, dialects()["hermes"])
    message, reason = answered(served, max_tokens=40)
    assert (message, reason) == ({"role": "assistant", "content": example[:40]}, "length")


def test_the_prompt_may_begin_the_thinking(served, script, monkeypatch):
    script("Hm.</think>So.", dialects()["plain"])
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", TEMPLATE + "<think>\n")
    message, _ = answered(served, tools=None)
    assert message == {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    script('{"a": 1}', dialects()["plain"])
    message, _ = answered(served, tools=None, response_format={"type": "json_object"})
    assert message["content"] == '{"a": 1}'


def test_log_probabilities_of_all_tokens_come_with_a_stream(served, script):
    example = dialects()["hermes"].example
    script(example, dialects()["hermes"])
    body = {"messages": [USER], "tools": TOOLS, "logprobs": True}
    _, answer = served.ask(CHAT, body)
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(example) + 1
    message, _ = streamed(served, body)
    assert message["tool_calls"][0]["function"] == CALL["function"]


# Forced calls.


def check_calls(message: dict, names: tuple[str, ...] = ("weather", "who")) -> list[str]:
    called = []
    for call in message["tool_calls"]:
        function = call["function"]
        assert function["name"] in names
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
        called.append(function["name"])
    assert called
    return called


@pytest.mark.parametrize("name", dialects())
def test_forced_calls_are_valid_in_each_dialect(served, monkeypatch, name):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(app, "find_dialect", lambda template: dialects()[name])
    called = []
    for seed in range(2):
        message, reason = answered(served, tool_choice="required", seed=seed)
        assert reason == "tool_calls"
        assert message["content"] is None
        assert len(message["tool_calls"]) == 1
        called += check_calls(message)
    choice = {"type": "function", "function": {"name": "who"}}
    message, _ = answered(served, tool_choice=choice, seed=7)
    assert check_calls(message, ("who",)) == ["who"]


def test_many_forced_calls_are_valid(served):
    pytest.importorskip("llguidance")
    called = set()
    for seed in range(0, 100, 10):
        body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "seed": seed, "n": 8}
        status, answer = served.ask(CHAT, body)
        assert status == 200, answer
        for choice in answer["choices"]:
            called.update(check_calls(choice["message"]))
    assert called == {"weather", "who"}


def test_several_forced_calls(served, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(app, "find_dialect", lambda template: dialects()["hermes"])
    options = {"tool_choice": "required", "parallel_tool_calls": True, "max_tokens": 400}
    counts = {len(check_calls(answered(served, seed=seed, **options)[0])) for seed in range(6)}
    assert max(counts) > 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_forced_call_follows_the_thinking(served, begun):
    """If the prompt has opened the thinking section, the model may think up to the end marker."""
    llguidance = pytest.importorskip("llguidance")
    ask = ChatRequest(messages=[USER], tools=TOOLS, tool_choice="required")
    for name in ("hermes", "glm-4", "plain"):
        form = AnswerFormat.of(ask, dialects()[name], "<think>\n" if begun else "<think></think>")
        grammar = llguidance.LLMatcher.grammar_from_lark(form.grammar({}))
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
        assert not matcher.get_error()
        call = '{"name": "who", "arguments": {"age": 5}}'
        call = f"<tool_call>\n{call}\n</tool_call>" if name == "hermes" else call
        text = f"I think {{}}.</think>\n\n{call}" if begun else call
        assert matcher.try_consume_tokens(list(text.encode())) == len(text)
        assert matcher.is_accepting()
        parts = form.parser().parse(text)
        assert (parts.thinking, parts.calls) == ("I think {}." if begun else "", [("who", {"age": 5})])


def test_markers_that_are_tokens_are_written_as_tokens():
    ask = ChatRequest(messages=[USER], tools=TOOLS, tool_choice="required")
    form = AnswerFormat.of(ask, dialects()["hermes"], "<think>")
    added = {"<tool_call>": 7, "</tool_call>": 8, "</think>": 9, "<|im_end|>": 3, "  ": 4}
    assert form.marker_tokens(added) == {"<tool_call>": 7, "</tool_call>": 8, "</think>": 9}
    grammar = form.grammar(form.marker_tokens(added))
    assert "thinking: /(?s:.*)/ <[9]>" in grammar
    assert "<[7]>" in grammar
    assert "<tool_call>" not in grammar


def test_special_tokens_are_shown_where_they_are_markers(served):
    ask = ChatRequest(messages=[USER], tools=TOOLS)
    special = {"[TOOL_CALLS]": 5, "[ARGS]": 6, "[CALL_ID]": 7, "[THINK]": 8, "</s>": 2, "[IMG]": 9}
    form = AnswerFormat.of(ask, dialects()["mistral-args"], "")
    assert sorted(form.marker_tokens(special).values()) == [5, 6, 7, 8]
    without = AnswerFormat.of(ChatRequest(messages=[USER]), dialects()["mistral-args"], "")
    assert sorted(without.marker_tokens(special).values()) == [8]


# History.


HISTORY = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}ARGUMENTS{% endfor %}{{ m.content or '' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Oslo"}'),
        ("{{ '' + c.function.arguments }}", '{"city":"Oslo"}'),
        ("{{ c.function.arguments }}", '{"city":"Oslo"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "city=Oslo"),
    ],
)
@pytest.mark.parametrize("given", ['{"city":"Oslo"}', {"city": "Oslo"}], ids=["text", "object"])
def test_calls_of_the_history_reach_the_template(served, monkeypatch, write, expected, given):
    tokenizer = served.llm.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", HISTORY.replace("ARGUMENTS", write))
    call = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": given}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm.", "refusal": None},
        {"role": "tool", "tool_call_id": "abc", "content": "-3"},
    ]
    status, answer = served.ask("/tokenize", {"messages": messages})
    assert status == 200, answer
    shown = tokenizer.decode(answer["tokens"])
    if isinstance(given, dict):  # converted to text only if the template needs text
        expected = expected.replace(":", ": ").replace(":  ", ": ")
    assert shown == f"[user]Hi[assistant](Hm.){expected}[tool]-3"


def test_a_round_trip_with_openais_client(served, script):
    openai = pytest.importorskip("openai")
    dialect = dialects()["hermes"]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        for stream in (False, True):
            script(f"<think>Hm.</think>{dialect.example}", dialect)
            asked = {"model": "tiny", "messages": [USER], "tools": TOOLS}
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    for _ in events:
                        pass
                    choice = events.get_final_completion().choices[0]
            else:
                choice = client.chat.completions.create(**asked).choices[0]
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
            assert choice.message.reasoning_content == "Hm."
            result = {"role": "tool", "tool_call_id": call.id, "content": "-3 degrees"}
            given = choice.message.model_dump() if stream else choice.message
            script("It is cold.", dialect)
            answer = client.chat.completions.create(**{**asked, "messages": [USER, given, result]}).choices[0]
            assert (answer.message.content, answer.message.tool_calls) == ("It is cold.", None)
            assert answer.finish_reason == "stop"
