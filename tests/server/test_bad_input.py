"""Every bad request gets a one-line message, the right status and the name of the field; the server keeps running."""

from __future__ import annotations

import json

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}


def text(**fields):
    return TEXT, {"prompt": "Hi", "max_tokens": 2, **fields}


def chat(**fields):
    return CHAT, {"messages": [USER], "max_tokens": 2, **fields}


TOOL = {"type": "function", "function": {"name": "f"}}


def tool(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


def called(arguments):
    return {"role": "assistant", "tool_calls": [{"id": "1", **tool(arguments=arguments)}]}


def raw(body: str | bytes, path=TEXT):
    return path, body if isinstance(body, bytes) else body.encode()


# Path and body of the request; expected status, field, and part of the message.
TABLE = {
    "no body": (*raw(""), 400, None, "the body is not valid JSON"),
    "not JSON": (*raw("{prompt: 1}"), 400, None, "the body is not valid JSON"),
    "not UTF-8": (*raw(b'{"prompt": "\xff"}'), 400, None, "the body is not valid JSON"),
    "a list": (*raw("[]"), 400, None, "a JSON list, not an object"),
    "a number": (*raw("1"), 400, None, "a JSON int, not an object"),
    "deep": (*raw('{"prompt":' + "[" * 5000 + "]" * 5000 + "}"), 400, None, "the body is not valid JSON"),
    "a number of 5000 digits": (*raw('{"prompt": "a", "seed": ' + "9" * 5000 + "}"), 400, None, "5000 digits"),
    "half a character": (*raw('{"prompt": "\\ud800"}'), 400, None, "the body is not valid JSON"),
    "half a character in a stop": (*raw('{"prompt": "a", "stop": "\\udfff"}'), 400, None, "not valid JSON"),
    "no prompt": (TEXT, {}, 400, "prompt", "prompt is missing"),
    "prompt is a number": (*text(prompt=5), 400, "prompt", "prompt"),
    "prompt is an object": (*text(prompt={}), 400, "prompt", "prompt"),
    "prompt is no prompts": (*text(prompt=[]), 400, "prompt", "empty list"),
    "prompt without tokens": (*text(prompt=[[]]), 400, None, "empty"),
    "texts and tokens mixed": (*text(prompt=["a", 1]), 400, "prompt", "prompt"),
    "tokens that are no integers": (*text(prompt=[1.5]), 400, "prompt", "prompt"),
    "tokens that are truths": (*text(prompt=[True]), 400, "prompt", "prompt"),
    "a token below 0": (*text(prompt=[-1]), 400, None, "token -1; the model's token ids are 0 to"),
    "a token out of range": (*text(prompt=[10**9]), 400, None, "the model's token ids are 0 to"),
    "a token of 30 digits": (*text(prompt=[10**30]), 400, None, "the model's token ids are 0 to"),
    "too many prompts": (*text(prompt=["a"] * 200), 400, None, "this server accepts at most 72 answers at once"),
    "more prompts than a list may have": (*text(prompt=["a"] * 2000), 400, "prompt", "at most 1024"),
    "a prompt that is too long": (*text(prompt="a" * 600), 400, None, "512"),
    "an answer that is too long": (*text(max_tokens=10_000), 400, None, "512"),
    "no tokens": (*text(max_tokens=0), 400, "max_tokens", "max_tokens is 0"),
    "fewer than no tokens": (*text(max_tokens=-1), 400, "max_tokens", "max_tokens is -1"),
    "tokens as text": (*text(max_tokens="5"), 400, "max_tokens", "valid integer"),
    "half a token": (*text(max_tokens=1.5), 400, "max_tokens", "integer"),
    "temperature below 0": (*text(temperature=-1), 400, "temperature", "at least 0"),
    "temperature is text": (*text(temperature="warm"), 400, "temperature", "number"),
    "temperature is not a number": (*raw('{"prompt": "a", "temperature": NaN}'), 400, "temperature", "nan"),
    "temperature beyond float32": (*text(temperature=1e300), 400, "temperature", "less than or equal to 100"),
    "temperature without end": (*raw('{"prompt": "a", "temperature": 1e999}'), 400, "temperature", "inf"),
    "top_p is 0": (*text(top_p=0), 400, "top_p", "above 0"),
    "top_p above 1": (*text(top_p=1.1), 400, "top_p", "at most 1"),
    "top_k below -1": (*text(top_k=-2), 400, "top_k", "at least 1"),
    "min_p above 1": (*text(min_p=2), 400, "min_p", "from 0 to 1"),
    "repetition_penalty is 0": (*text(repetition_penalty=0), 400, "repetition_penalty", "from 0.001 to 1000"),
    "repetition_penalty beyond float32": (*text(repetition_penalty=1e39), 400, "repetition_penalty", "from 0.001"),
    "presence_penalty above 2": (*text(presence_penalty=2.1), 400, "presence_penalty", "less than or equal to 2"),
    "frequency_penalty below -2": (*text(frequency_penalty=-1e300), 400, "frequency_penalty", "equal to -2"),
    "frequency_penalty is NaN": (*raw('{"prompt": "a", "frequency_penalty": NaN}'), 400, "frequency_penalty", "nan"),
    "seed below 0": (*text(seed=-1), 400, "seed", "at least 0"),
    "seed of 65 bits": (*text(seed=2**64), 400, "seed", "below 2**63"),
    "an empty stop": (*text(stop=""), 400, "stop", "at least 1 character"),
    "an empty stop in a list": (*text(stop=["a", ""]), 400, "stop", "at least 1 character"),
    "10,000 stops": (*text(stop=["a"] * 10_000), 400, "stop", "at most 64"),
    "a stop that is a number": (*text(stop=[1]), 400, "stop", "string"),
    "a stop token that is a text": (*text(stop_token_ids=["a"]), 400, "stop_token_ids", "integer"),
    "no answers": (*text(n=0), 400, "n", "greater than or equal to 1"),
    "too many answers": (*text(n=17), 400, "n", "less than or equal to 16"),
    "too many answers to many prompts": (*text(prompt=["a"] * 5, n=16), 400, None, "5 prompts with 16 answers each"),
    "best of several": (*text(best_of=3), 400, "best_of", "this server supports only 1"),
    "a suffix": (*text(suffix="x"), 400, "suffix", "not supported"),
    "a bias of what is no token": (*text(logit_bias={"a": 2}), 400, "logit_bias", "'a' is not a token id"),
    "a bias of a token below 0": (*text(logit_bias={"-1": 2}), 400, "logit_bias", "not a token id"),
    "a bias of a token out of range": (*text(logit_bias={"99999": 2}), 400, None, "logit_bias holds token 99999"),
    "a bias that is too large": (*text(logit_bias={"5": 101}), 400, "logit_bias", "less than or equal to 100"),
    "a bias that is a text": (*text(logit_bias={"5": "1"}), 400, "logit_bias", "valid number"),
    "a bias that is not a number": (*raw('{"prompt": "a", "logit_bias": {"5": NaN}}'), 400, "logit_bias", "nan"),
    "too many biases": (
        *text(logit_bias={str(token): 1 for token in range(2000)}), 400, "logit_bias", "at most 1024 entries"
    ),
    "a field that nobody knows": (*text(tempratur=1), 400, "tempratur", "not supported"),
    "too many log-probabilities": (*text(logprobs=21), 400, "logprobs", "20"),
    "log-probabilities as truth": (*text(logprobs=True), 400, "logprobs", "integer"),
    "a stream's options without a stream": (*text(stream_options={}), 400, "stream_options", "without stream"),
    "a stream's option that is unknown": (
        *text(stream=True, stream_options={"x": 1}), 400, "stream_options", "stream_options.x is not supported"
    ),
    "an echo of a token id of no vocabulary": (
        *text(prompt=[5, -(10**21)], echo=True), 400, "prompt", "not in the model's vocabulary"
    ),
    "a stream of an echo's log-probabilities": (
        *text(stream=True, echo=True, logprobs=1), 400, "echo", "cannot be streamed"
    ),
    "stream is a text": (*text(stream="yes"), 400, "stream", "boolean"),
    "another model": (*text(model="gpt-4"), 404, "model", "use 'tiny'"),
    "model is a number": (*text(model=4), 400, "model", "string"),
    "no messages": (CHAT, {}, 400, "messages", "messages is missing"),
    "messages of nothing": (*chat(messages=[]), 400, "messages", "at least 1"),
    "a message without a role": (*chat(messages=[{"content": "a"}]), 400, "messages", "messages.0.role is missing"),
    "a message that is a text": (*chat(messages=["Hi"]), 400, "messages", "messages.0"),
    "content is a number": (*chat(messages=[{"role": "user", "content": 1}]), 400, "messages", "messages.0.content"),
    "an image": (
        *chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400, "messages", "this server supports only 'text'",
    ),
    "log-probabilities without being asked": (*chat(top_logprobs=2), 400, "top_logprobs", "without logprobs"),
    "two numbers of tokens": (*chat(max_completion_tokens=2), 400, "max_tokens", "one of them"),
    "a call of no tool": (*chat(tool_choice="required"), 400, "tool_choice", "has no tools"),
    "a choice that nobody knows": (*chat(tools=[TOOL], tool_choice="any"), 400, "tool_choice", "'required'"),
    "a function that is no tool": (
        *chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice",
        "'g', which is not among the tools",
    ),
    "a forced call in another format": (
        *chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}), 400, "response_format",
        "does not work with a tool_choice",
    ),
    "a forced call without an end": (
        *chat(tools=[TOOL], tool_choice="required", ignore_eos=True), 400, "ignore_eos", "tool_choice"
    ),
    "parameters that cannot be followed": (
        *chat(tools=[tool(parameters={"properties": {"a": {"type": "fruit"}}})], tool_choice="required"), 400, "tools",
        "cannot be enforced",
    ),
    "parameters that are no object": (*chat(tools=[tool(parameters={"type": "string"})]), 400, "tools", "'object'"),
    "a tool without a name": (*chat(tools=[{"type": "function", "function": {}}]), 400, "tools", "name is missing"),
    "a tool of another kind": (*chat(tools=[{"type": "custom"}]), 400, "tools", "tools"),
    "a name with a quote": (*chat(tools=[tool(name='a"b')]), 400, "tools", "pattern"),
    "a call in the history that is none": (*chat(messages=[USER, called(5)]), 400, "messages", "arguments"),
    "a call with half its arguments": (*chat(messages=[USER, called('{"a":')]), 400, "messages", "not valid JSON"),
    "a call with a list of arguments": (*chat(messages=[USER, called("[1]")]), 400, "messages", "a JSON list"),
    "too many calls": (
        *chat(messages=[USER, {**called("{}"), "tool_calls": called("{}")["tool_calls"] * 1100}]), 400, "messages",
        "at most 1024",
    ),
    "a role that the template refuses": (*chat(messages=[{"role": "judge"}]), 400, None, "no judge here"),
    "a form that is unknown": (*chat(response_format={"type": "xml"}), 400, "response_format", "json_schema"),
    "a schema that is missing": (
        *chat(response_format={"type": "json_schema"}), 400, "response_format", "}: type is 'json_schema', but the"
    ),
    "a schema that cannot be followed": (
        *chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "fruit"}}}),
        400, None, "json_schema is not supported",
    ),
    "a template of the client's": (
        *chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}), 400, "chat_template_kwargs", "reserved for the server"
    ),
    "tools that are no list": (*chat(tools={"a": 1}), 400, "tools", "list"),
    "tokenize nothing": ("/tokenize", {}, 400, None, "either prompt or messages"),
    "detokenize what is unknown": ("/detokenize", {"tokens": [1, 99999]}, 400, "tokens", "99999"),
    "no such page": ("/v1/engines", {}, 404, None, "Not Found"),
    "shutdown": ("/shutdown", {}, 404, None, "Not Found"),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_bad_input(served, case):
    path, body, status, field, message = TABLE[case]
    actual, answer = served.ask(path, body)
    assert actual == status, answer
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert message in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert answer["error"]["param"] == field


GOOD = {
    "an empty prompt is BOS": text(prompt=""),
    "a prompt of special tokens only": text(prompt=[0, 1, 0]),
    "nulls are not given": text(suffix=None, seed=None, logit_bias=None, stop=None),
    "a stop across the border of tokens": text(stop=["ab", "ba", "zz"]),
    "OpenAI's largest temperature": text(temperature=2),
    "what clients say about themselves": text(user="me", stream=False, n=1, best_of=1),
    "a conversation of one text part": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]),
    "a variable of the template": chat(chat_template_kwargs={"enable_thinking": False}),
    "several answers": text(n=2, temperature=0),
    "a bias": text(logit_bias={"1": 2, "5": -100}),
    "tools and a choice that forces nothing": chat(tools=[tool(strict=True)], tool_choice="auto"),
    "a call without arguments": chat(messages=[USER, called(""), {"role": "tool", "content": "1"}]),
    "a message with fields of its own": chat(messages=[{**USER, "name": "Ann"}]),
}


@pytest.mark.parametrize("case", GOOD)
def test_good_input(served, case):
    path, body = GOOD[case]
    status, answer = served.ask(path, body)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_too_large_a_body(served):
    body = json.dumps({"prompt": "a" * (1 << 24)}).encode()
    assert served.ask(TEXT, body)[0] == 413


def test_get_and_post_are_told_apart(served):
    assert served.ask(TEXT)[0] == 405
    assert served.ask("/v1/models", {})[0] == 405
