"""Test that OpenAI's own client gets the same answers as the engine gives in process."""

from __future__ import annotations

import asyncio
import json
from itertools import takewhile

import pytest

from quantkit.runtime.llm import LLM
from quantkit.runtime.types import SamplingParams

openai = pytest.importorskip("openai")

PROMPT = "The fox of Rome counted"


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, threads=1)


def test_completion(client, llm):
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=20))[0]
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_several_prompts_of_text_and_tokens(client, llm):
    texts = ["One", "Two apples", "Three"]
    expected = [each.text for each in llm.generate(texts, SamplingParams(max_tokens=9))]
    ids = [llm.encode(text) for text in texts]
    for prompt in (texts, ids):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_drawing_is_the_engines(client, llm):
    params = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.8, seed=7, presence_penalty=0.3)
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, temperature=0.9, top_p=0.8, seed=7, presence_penalty=0.3
    )
    assert answer.choices[0].text == llm.generate(PROMPT, params)[0].text


def test_stream_adds_up_to_the_whole(client, llm):
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=30))[0]
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    assert "".join(choice.text for part in parts for choice in part.choices) == expected.text
    assert len(parts) > 5
    assert parts[-1].usage.completion_tokens == len(expected.token_ids)
    assert [choice.finish_reason for part in parts for choice in part.choices][-1] == "length"


def test_each_part_counts_tokens(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = list(
        client.completions.create(
            model="tiny", prompt=[[5] * 3, [6] * 4], max_tokens=9, temperature=0, stream=True, stream_options=options
        )
    )
    counted = [(part.usage.prompt_tokens, part.usage.completion_tokens, part.usage.total_tokens) for part in parts]
    assert counted == sorted(counted)
    assert counted[0][1] < 18
    assert counted[-1] == (7, 18, 25)
    assert all(prompt == 7 and total == 7 + new for prompt, new, total in counted)


def test_a_stream_of_no_tokens_is_the_prompt(client):
    options = {"max_tokens": 0, "echo": True, "stream": True, "stream_options": {"include_usage": True}}
    parts = list(client.completions.create(model="tiny", prompt=PROMPT, temperature=0, **options))
    assert "".join(choice.text for part in parts for choice in part.choices) == PROMPT
    assert parts[-1].usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client, llm, stream):
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=6, logprobs=3))[0].logprobs
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3, stream=stream
    )
    choices = [part.choices[0] for part in (answer if stream else [answer])]
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    values = [value for part in parts for value in part.token_logprobs]
    assert values == pytest.approx([each.logprob for each in expected], abs=1e-5)
    tops = [top for part in parts for top in part.top_logprobs]
    assert all(value == pytest.approx(max(top.values())) for value, top in zip(values, tops, strict=True))
    text = "".join(choice.text for choice in choices)
    offsets = [at for part in parts for at in part.text_offset]
    tokens = [token for part in parts for token in part.tokens]
    whole = list(takewhile(str.isascii, tokens))  # other characters appear with their last byte
    assert all(text[at:].startswith(token) for at, token in zip(offsets, whole, strict=False))
    assert offsets == sorted(offsets)


def test_echo_scores_the_prompt(client, llm):
    ids = llm.encode(PROMPT)
    table = llm.score([ids])[0].log_softmax(-1)
    for max_tokens in (0, 1):
        choice = client.completions.create(
            model="tiny", prompt=ids, max_tokens=max_tokens, temperature=0, echo=True, logprobs=2
        ).choices[0]
        assert choice.text.startswith(PROMPT)
        assert (choice.text == PROMPT) == (max_tokens == 0)
        values, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert len(values) == len(ids) + max_tokens
        assert values[0] is tops[0] is None
        expected = [float(table[at, token]) for at, token in enumerate(ids[1:])]
        assert values[1 : len(ids)] == pytest.approx(expected, abs=1e-5)
        for row, top in zip(table, tops[1 : len(ids)], strict=False):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-5)


def test_chat(client, llm):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    plain = [messages[0], {"role": "user", "content": "Hi"}]
    expected = llm.chat(plain, SamplingParams(max_tokens=15)).text
    options = {"model": "tiny", "messages": messages, "temperature": 0}
    assert client.chat.completions.create(**options, max_tokens=15).choices[0].message.content == expected
    parts = list(client.chat.completions.create(**options, max_completion_tokens=15, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert parts[-1].choices[0].finish_reason == "length"


def test_chat_log_probabilities_and_tools(client, llm):
    tools = [{"type": "function", "function": {"name": "look"}}]
    messages = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2, tools=tools
    )
    ids = llm.encode_chat(messages, tools=tools)
    assert answer.usage.prompt_tokens == len(ids) > len(llm.encode_chat(messages))
    expected = llm.generate(ids, SamplingParams(max_tokens=4, logprobs=2))[0].logprobs
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([each.logprob for each in expected], abs=1e-5)
    assert all(len(entry.top_logprobs) == 2 for entry in content)


def test_answers_of_a_schema(client):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    schema["additionalProperties"] = False
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
    )  # fmt: skip
    assert 0 <= json.loads(answer.choices[0].message.content)["n"] <= 9


def test_asynchronous_clients_share_the_batch(served, llm):
    async def ask(client, number):
        prompt = f"{number} apples"
        stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True)
        return "".join([part.choices[0].text async for part in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(20)))

    expected = llm.generate([f"{number} apples" for number in range(20)], SamplingParams(max_tokens=12))
    assert asyncio.run(all_of_them()) == [each.text for each in expected]


def test_several_answers_are_reproducible(client, llm):
    """The first answer uses the seed, the others use derived seeds. This holds for streams and several prompts too."""
    asked = {"model": "tiny", "prompt": [PROMPT, "Two"], "max_tokens": 12, "n": 3, "seed": 5}
    answer = client.completions.create(**asked)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len(set(texts)) == 6
    alone = llm.generate([PROMPT, "Two"], SamplingParams(max_tokens=12, temperature=1.0, seed=5))
    assert [texts[0], texts[3]] == [each.text for each in alone]
    assert answer.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in alone)
    assert answer.usage.completion_tokens == 6 * 12
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    joined = [""] * 6
    for part in parts:
        for choice in part.choices:
            joined[choice.index] += choice.text
    assert joined == texts
    assert parts[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    assert parts[-1].usage.completion_tokens == 72


def test_several_answers_share_the_prompt(client, served):
    messages = [{"role": "user", "content": "How many apples has the fox of Rome? " * 8}]
    stats = served.llm.stats()
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, n=4, seed=1)
    page = served.bridge.engine.config.page_size
    shared = (answer.usage.prompt_tokens - 1) // page * page
    assert shared > 200
    assert served.llm.stats()["prefix_hit_tokens"] - stats["prefix_hit_tokens"] >= 3 * shared
    roles = [
        choice
        for part in client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=5, n=4, seed=1, stream=True
        )
        for choice in part.choices
    ]
    assert sorted(choice.index for choice in roles if choice.delta.role) == [0, 1, 2, 3]
    for index, whole in enumerate(answer.choices):
        text = "".join(choice.delta.content or "" for choice in roles if choice.index == index)
        assert text == whole.message.content


def test_a_client_that_leaves_takes_all_its_answers_along(client, served):
    from tests.server.conftest import wait_until

    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(model="tiny", prompt="a", max_tokens=480, n=6)
    wait_until(lambda: served.bridge.num_open == 0)
    wait_until(lambda: not served.bridge.engine.has_work)
    assert not served.bridge._followers


def test_a_bias_forces_and_excludes_tokens(client, llm):
    forced = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, logit_bias={"40": 100})
    assert forced.choices[0].text == llm.tokenizer.decode([40] * 5)
    free = llm.generate(PROMPT, SamplingParams(max_tokens=9))[0].token_ids
    banned = {str(token): -100 for token in free}
    other = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, logit_bias=banned)
    expected = llm.generate(
        PROMPT, SamplingParams(max_tokens=9, logit_bias={int(token): value for token, value in banned.items()})
    )[0]
    assert other.choices[0].text == expected.text
    assert not set(expected.token_ids) & set(free)


def test_errors_have_openais_classes(client, served):
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; use 'tiny'"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="suffix is not supported") as caught:
        client.completions.create(model="tiny", prompt="a", suffix="b")
    assert caught.value.param == "suffix"
    with pytest.raises(openai.BadRequestError, match=r"at most 512|512 tokens"):
        client.completions.create(model="tiny", prompt="a" * 600, max_tokens=1)


def test_a_client_that_times_out_frees_its_pages(client, served):
    from tests.server.conftest import wait_until

    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.02).completions.create(model="tiny", prompt="a", max_tokens=480, seed=1, n=8)
    wait_until(lambda: served.bridge.num_open == 0)
    wait_until(lambda: not served.bridge.engine.has_work)


def test_models(client):
    for model in (client.models.list().data[0], client.models.retrieve("tiny")):
        assert (model.id, model.max_model_len) == ("tiny", 512)
        assert model.created > 1_700_000_000
    with pytest.raises(openai.NotFoundError, match="'some/other' is not served here"):
        client.models.retrieve("some/other")
